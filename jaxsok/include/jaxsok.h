/* Frozen tables from C and C++: open a folder, look keys up, close it.
 *
 * A folder is what `jaxsok.serving.export_frozen` or `python -m jaxsok freeze` wrote. `python -m jaxsok flags` prints
 * what a compiler needs to find this header and the library; neither Python nor JAX is needed afterwards.
 *
 *   libjaxsok_cpu.so    tables in host memory: files are mapped, lookups run in the calling thread
 *   libjaxsok_cuda.so   the same functions for tables in the memory of a GPU: lookups run on a CUDA stream
 *
 * Threads: tables never change once they are open, so any number of threads may look them up at one time, without
 * locks. One thread closes them when no other uses them any more.
 *
 * Errors: a function that can fail returns JAXSOK_OK or another jaxsok_status, and jaxsok_error() says in words what
 * was wrong. A call that fails has changed nothing, but for embeddings of a JAXSOK_DEVICE_FAILED lookup.
 *
 * Files: nothing that is read is executed or trusted. Sizes, and by default checksums, are checked before anything is
 * used. Do not change a folder that is open: write a new one, open it, and close the old one. A file that is cut while
 * it is mapped ends the process (SIGBUS); JAXSOK_IN_MEMORY avoids that.
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
  JAXSOK_BAD_ARGUMENT = 1,  /* the call is wrong */
  JAXSOK_NO_FOLDER = 2,     /* the folder or one of its files cannot be read */
  JAXSOK_BAD_FOLDER = 3,    /* a file is damaged, cut, of another size, or of another version */
  JAXSOK_NO_MEMORY = 4,     /* of the host or of the GPU */
  JAXSOK_DEVICE_FAILED = 5, /* CUDA reported an error */
  JAXSOK_BAD_INDEX = 6      /* a lookup met a row that the table does not have; only without checksums */
} jaxsok_status;

/* How the rows of a bag become its embedding. */
typedef enum jaxsok_combiner {
  JAXSOK_ROWS = 0, /* no bags: every key reads its own row */
  JAXSOK_SUM = 1,
  JAXSOK_MEAN = 2, /* the sum divided by the number of keys, or by the sum of their weights */
  JAXSOK_SQRTN = 3 /* the sum divided by the square root of that number, or of the sum of the squared weights */
} jaxsok_combiner;

/* Bits of `flags` of jaxsok_open. */
#define JAXSOK_UNVERIFIED 1u /* checks sizes but no checksums: opens without reading the rows */
#define JAXSOK_IN_MEMORY 2u  /* reads files into memory in place of mapping them */

/* Tables that are open. */
typedef struct jaxsok_tables jaxsok_tables;

/* Keys that read one table. Its keys are keys[first_key] .. keys[first_key + num_keys - 1] of the batch. */
typedef struct jaxsok_feature {
  int32_t table;        /* its number: jaxsok_find_table */
  int32_t combiner;     /* jaxsok_combiner */
  int64_t first_key;    /* features of a batch lie one after the other: not before the end of the feature before */
  int64_t num_keys;     /* may be 0 */
  int64_t num_bags;     /* rows of `out`; with JAXSOK_ROWS equal to num_keys */
  int64_t first_offset; /* of num_bags + 1 offsets: bag b has the keys offsets[b] to offsets[b + 1] - 1, counted from
                           first_key. -1: every bag has num_keys / num_bags keys */
  int64_t first_weight; /* of num_keys weights, with which rows are multiplied; -1: none */
  float* out;           /* [num_bags, dim], written. On a GPU in its memory, at a multiple of 16 bytes */
} jaxsok_feature;

/* A batch. With libjaxsok_cuda.so keys, offsets, weights and every `out` lie in the GPU's memory; the array of features
 * is always in the host's, and may change as soon as jaxsok_lookup returns. */
typedef struct jaxsok_batch {
  const uint64_t* keys; /* int64 keys are passed by their bits */
  int64_t num_keys;     /* below 2^31 */
  const int32_t* offsets;
  int64_t num_offsets;
  const float* weights;
  int64_t num_weights;
  const jaxsok_feature* features;
  int32_t num_features; /* of the tables of one dim and dtype at most 1,024 */
} jaxsok_batch;

/* JAXSOK_API_VERSION of the library. */
JAXSOK_API int32_t jaxsok_api_version(void);

/* "cpu" or "cuda": where the tables of this library lie. */
JAXSOK_API const char* jaxsok_platform(void);

/* What was wrong with the last call of this thread that failed; "" if none did. Valid until its next call. */
JAXSOK_API const char* jaxsok_error(void);

/* Opens a folder. `device`: the number of the GPU; 0 with libjaxsok_cpu.so. `flags`: 0, or bits of the above.
 * Cost: reads every file once, for its checksum; with a GPU copies it there. `*tables` is set only on success. */
JAXSOK_API int32_t jaxsok_open(const char* folder, int32_t device, uint32_t flags, jaxsok_tables** tables);

/* Releases tables and all that they hold; NULL is ignored. Lookups on a stream may still run: it waits for them. */
JAXSOK_API void jaxsok_close(jaxsok_tables* tables);

/* The tables are numbered from 0. A number that no table has gives NULL or -1. */
JAXSOK_API int32_t jaxsok_num_tables(const jaxsok_tables* tables);
JAXSOK_API const char* jaxsok_table_name(const jaxsok_tables* tables, int32_t table); /* UTF-8, until close */
JAXSOK_API int32_t jaxsok_table_dim(const jaxsok_tables* tables, int32_t table);      /* numbers in a row */
JAXSOK_API int64_t jaxsok_table_num_rows(const jaxsok_tables* tables, int32_t table);
JAXSOK_API int32_t jaxsok_find_table(const jaxsok_tables* tables, const char* name);

/* Looks all features of a batch up, and writes their embeddings as float32.
 *
 * The bits are those of `jaxsok.serving.lookup`: a key without a row reads the default or the initial row of its table,
 * JAXSOK_PADDING_KEY and empty bags read zeros.
 *
 * `stream`: a cudaStream_t of the tables' device, on which the lookup is enqueued; NULL: the default one. Nothing is
 * waited for, and the call may be captured in a CUDA graph. With libjaxsok_cpu.so it is ignored, and the embeddings are
 * there when the call returns.
 *
 * On the host offsets that fall or leave the feature are refused; on a GPU they are made to rise within it. */
JAXSOK_API int32_t jaxsok_lookup(const jaxsok_tables* tables, const jaxsok_batch* batch, void* stream);

#if defined(__cplusplus)
}
#endif

#endif /* JAXSOK_H_ */
