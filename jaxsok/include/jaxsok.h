/* Frozen tables from C and C++: open a folder, look up keys, close it.
 *
 * `jaxsok.serving.export_frozen` or `python -m jaxsok freeze` writes such a folder. `python -m jaxsok flags` prints the
 * compiler flags for this header and the library; neither Python nor JAX is needed afterwards.
 *
 *   libjaxsok_cpu.so    tables in host memory: files are mapped, lookups run in the calling thread
 *   libjaxsok_cuda.so   the same functions for tables in the memory of a GPU: lookups run on a CUDA stream
 *
 * Threads: open tables never change, so any number of threads may look keys up at the same time, without locks. One
 * thread closes the tables when no other thread uses them any more.
 *
 * Errors: a function that can fail returns JAXSOK_OK or another jaxsok_status, and jaxsok_error() returns a message. A
 * call that fails changes nothing, except the embeddings of a JAXSOK_DEVICE_FAILED or JAXSOK_BAD_INDEX lookup.
 *
 * Files: their contents are neither executed nor trusted. Sizes, and by default checksums, are checked before use. Do
 * not change an open folder: write a new one, open it, and close the old one. If a file is truncated while it is
 * mapped, the process ends (SIGBUS); JAXSOK_IN_MEMORY avoids that.
 */
#ifndef JAXSOK_H_
#define JAXSOK_H_

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define JAXSOK_API __attribute__((visibility("default")))

/* Changed when a function or a structure below changes its meaning. Compare it with jaxsok_api_version(). */
#define JAXSOK_API_VERSION 1

/* The key that reads zeros and counts as no key of its bag. */
#define JAXSOK_PADDING_KEY UINT64_MAX

typedef enum jaxsok_status {
  JAXSOK_OK = 0,
  JAXSOK_BAD_ARGUMENT = 1,  /* an argument is invalid */
  JAXSOK_NO_FOLDER = 2,     /* the folder or one of its files cannot be read */
  JAXSOK_BAD_FOLDER = 3,    /* a file is damaged, truncated, or of another size or version */
  JAXSOK_NO_MEMORY = 4,     /* on the host or on the GPU */
  JAXSOK_DEVICE_FAILED = 5, /* CUDA reported an error */
  JAXSOK_BAD_INDEX = 6      /* the index names a row that the table does not have; only without checksums */
} jaxsok_status;

/* How the rows of a bag become its embedding. */
typedef enum jaxsok_combiner {
  JAXSOK_ROWS = 0, /* no bags: every key reads its own row */
  JAXSOK_SUM = 1,
  JAXSOK_MEAN = 2, /* the sum divided by the number of keys, or by the sum of their weights; zeros if that is 0 */
  JAXSOK_SQRTN = 3 /* the sum divided by the square root of that number, or of the sum of the squared weights */
} jaxsok_combiner;

/* Bits of `flags` of jaxsok_open. */
#define JAXSOK_UNVERIFIED 1u /* checks sizes but no checksums: opens without reading the rows */
#define JAXSOK_IN_MEMORY 2u  /* reads files into memory instead of mapping them */

/* Open tables. */
typedef struct jaxsok_tables jaxsok_tables;

/* Keys that read one table. Its keys are keys[first_key] .. keys[first_key + num_keys - 1] of the batch. */
typedef struct jaxsok_feature {
  int32_t table;        /* its number: jaxsok_find_table */
  int32_t combiner;     /* jaxsok_combiner */
  int64_t first_key;    /* at or after the end of the previous feature */
  int64_t num_keys;     /* may be 0 */
  int64_t num_bags;     /* rows of `out`; with JAXSOK_ROWS equal to num_keys */
  int64_t first_offset; /* the first of num_bags + 1 offsets: bag b has the keys offsets[b] to offsets[b + 1] - 1,
                           counted from first_key. -1: every bag has num_keys / num_bags keys, at least
                           one */
  int64_t first_weight; /* the first of num_keys weights that multiply rows; -1: none */
  float* out;           /* [num_bags, dim], written. For a GPU it is aligned to 16 bytes */
} jaxsok_feature;

/* A batch. With libjaxsok_cuda.so keys, offsets, weights and every `out` are in GPU memory, or in pinned host memory,
 * which the kernels read and write over the link. The array of features is always in host memory, and may change as
 * soon as jaxsok_lookup returns. */
typedef struct jaxsok_batch {
  const uint64_t* keys; /* int64 keys are passed by their bits */
  int64_t num_keys;     /* below 2^31 */
  const int32_t* offsets;
  int64_t num_offsets;
  const float* weights;
  int64_t num_weights;
  const jaxsok_feature* features;
  int32_t num_features; /* at most 1,024 for the tables of one dim and dtype */
} jaxsok_batch;

/* Returns the library's JAXSOK_API_VERSION. */
JAXSOK_API int32_t jaxsok_api_version(void);

/* Returns "cpu" or "cuda", the memory that holds the tables of this library. */
JAXSOK_API const char* jaxsok_platform(void);

/* Returns the message of this thread's last failed call; "" if none failed. Valid until its next call. */
JAXSOK_API const char* jaxsok_error(void);

/* Opens a folder. `device`: the number of the GPU; 0 with libjaxsok_cpu.so. `flags`: 0, or the bits above.
 * Cost: reads every file once, for its checksum; libjaxsok_cuda.so also copies it to the GPU, but for the rows that
 * were frozen to stay in host memory (`device_share`): those it copies to pinned memory, which the GPU reads. `*tables`
 * is NULL if it fails. */
JAXSOK_API int32_t jaxsok_open(const char* folder, int32_t device, uint32_t flags, jaxsok_tables** tables);

/* Releases tables and all that they hold; NULL is ignored. It waits for lookups that still run on a stream. */
JAXSOK_API void jaxsok_close(jaxsok_tables* tables);

/* Describe the tables, which are numbered from 0. For a number that no table has they return NULL or -1. */
JAXSOK_API int32_t jaxsok_num_tables(const jaxsok_tables* tables);
JAXSOK_API const char* jaxsok_table_name(const jaxsok_tables* tables, int32_t table); /* UTF-8, until close */
JAXSOK_API int32_t jaxsok_table_dim(const jaxsok_tables* tables, int32_t table);      /* numbers in a row */
JAXSOK_API int64_t jaxsok_table_num_rows(const jaxsok_tables* tables, int32_t table);
JAXSOK_API int32_t jaxsok_find_table(const jaxsok_tables* tables, const char* name);

/* Looks up all features of a batch, and writes their embeddings as float32.
 *
 * The bits are those of `jaxsok.serving.lookup`: a key without a row reads the default or initial row of its table;
 * JAXSOK_PADDING_KEY and empty bags read zeros.
 *
 * `stream`: a cudaStream_t of the tables' device, on which the lookup is enqueued; NULL: the default stream. The call
 * does not wait, and may be captured in a CUDA graph. libjaxsok_cpu.so ignores `stream`, and the embeddings are
 * complete when the call returns.
 *
 * The CPU library refuses offsets that decrease or leave the feature; on a GPU they are clamped to rise within it. */
JAXSOK_API int32_t jaxsok_lookup(const jaxsok_tables* tables, const jaxsok_batch* batch, void* stream);

#if defined(__cplusplus)
}
#endif

#endif /* JAXSOK_H_ */
