"""Synthetic click logs with a planted signal: Criteo's text, MLPerf's binary files; `jaxsok.data.criteo` reads them."""

import concurrent.futures
import hashlib
import io
import os
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
from synthetic_bags import BAG_SIZES, TABLE_ROWS, draw_bags, mix, power_law_ranks

from jaxsok.data.criteo import COLUMN_NAMES, MISSING_KEY, NUM_CATEGORIES, NUM_INTEGERS

CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct keys of C1 … C26 in Kaggle's train.txt."""

DAY_SAMPLES = 1 << 18
"""Samples of the files of a day: whole batches of any power of two up to this."""

_MISSING_INTEGERS = (0.45, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.0, 0.04, 0.45, 0.04, 0.77, 0.22)
_MISSING_CATEGORIES = (
    0.0, 0.0, 0.03, 0.03, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03, 0.0,
    0.0, 0.0, 0.03, 0.0, 0.0, 0.44, 0.44, 0.03, 0.76, 0.0, 0.03, 0.44, 0.44,
)  # fmt: skip
# The shares of missing values follow Kaggle's train.txt.

_CHUNK_ROWS = 1 << 16
_LOG_VERSION = 1  # part of the name of a cached log: raise it when the same seed gives other rows

_KEY_EFFECT = 0.25  # standard deviation of what one category adds to the logit
_PAIRS = ((0, 13), (4, 8), (5, 16), (7, 22))  # columns of few keys whose products count: what a dot interaction finds
_PAIR_EFFECT = 0.35
_INTEGER_EFFECT = 0.12
_BIAS = -1.65  # a base rate of 0.25, about that of Kaggle's log


def write_log(path: str | os.PathLike, num_rows: int, seed: int = 0, *, max_cardinality: int = 200_000) -> None:
    """Writes a log in Criteo's format whose labels follow a planted signal.

    Keys follow a power law over as many keys as Criteo's columns have, at most `max_cardinality`; as many values are
    missing. A label is 1 with probability sigmoid(`planted_logit`), about 0.25 on average. The same arguments write
    the same bytes. The file appears when it is complete: an interrupted call leaves nothing.

    Args:
      path: where to; replaced if it is there.
      num_rows: rows to write.
      seed: chooses rows and labels; the effect of a key is the same for all seeds.
      max_cardinality: the most keys of one column.

    Cost:
      About 6 µs and 240 bytes a row.
    """
    path = pathlib.Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            for start in range(0, num_rows, _CHUNK_ROWS):
                rng = np.random.default_rng([seed, start])
                _write_chunk(file, rng, min(_CHUNK_ROWS, num_rows - start), max_cardinality)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def cache_folder(given: str | os.PathLike | None) -> pathlib.Path:
    """Returns the folder that was given; None is `jaxsok` under `$XDG_CACHE_HOME`, by default `~/.cache`."""
    if given is None:
        given = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jaxsok"
    return pathlib.Path(given)


def cached_log(num_rows: int, seed: int = 0, cache_dir: str | os.PathLike | None = None) -> pathlib.Path:
    """Gives the path of a synthetic log, written by the first call and read by the later ones.

    Args:
      num_rows: rows of the log.
      seed: as of `write_log`.
      cache_dir: where it lies, as of `cache_folder`.

    Returns:
      The path of the complete file.
    """
    path = cache_folder(cache_dir) / f"clicks-v{_LOG_VERSION}-{num_rows}-rows-seed-{seed}.tsv"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_log(path, num_rows, seed)
    return path


def write_bags(
    folder: str | os.PathLike,
    num_rows: int,
    seed: int = 0,
    *,
    table_rows: Sequence[int] = TABLE_ROWS,
    bag_sizes: Sequence[int] = BAG_SIZES,
    is_uniform: bool = False,
    num_threads: int | None = None,
) -> None:
    """Writes binary files of samples with a bag of keys in each category, of the form of MLPerf's DLRM-DCNv2.

    A sample has one key for each category, by a power law over all rows of its table. This key and the keys that belong
    to it are the bag: they are drawn once, uniformly over the table, and so a bag comes back whenever its first key
    does (`synthetic_bags`). With `is_uniform` every key of every bag is drawn by itself. A label is 1 with the
    probability sigmoid(`planted_logit`) of the first keys. The same arguments write the same bytes, whatever the number
    of threads.

    Each `DAY_SAMPLES` samples are the files of a day: `day_0_labels.npy`, `day_0_dense.npy` (float32 [n, 13]) and
    `day_0_sparse_multi_hot.npz` (int32 [n, bag size] for each category). The folder appears when it is complete.

    Args:
      folder: where to; must not be there.
      num_rows: samples to write.
      seed: chooses samples and labels; bags and the effects of keys are the same for all seeds.
      table_rows: keys of each of the 26 categories are below these.
      bag_sizes: keys of a bag in each category.
      is_uniform: whether all keys are equally likely and independent.
      num_threads: threads that make days; None: one for each core. Each holds the samples of a day in memory.

    Raises:
      OSError: the disk has too little room; nothing is written.

    Cost:
      Of processor time about 10 µs a sample with the default sizes, 912 bytes of disk, and 0.5 GB of memory a thread.
    """
    folder = pathlib.Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    num_bytes = num_rows * 4 * (sum(bag_sizes) + NUM_INTEGERS + 1)
    if (free := shutil.disk_usage(folder.parent).free) < num_bytes:
        raise OSError(f"write_bags: {folder}: {num_bytes:,} bytes are needed, {free:,} are free; write fewer rows.")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        with concurrent.futures.ThreadPoolExecutor(num_threads or len(os.sched_getaffinity(0))) as pool:
            days = [
                pool.submit(_write_day, partial, day, min(DAY_SAMPLES, num_rows - day * DAY_SAMPLES), seed, table_rows,
                    bag_sizes, is_uniform)
                for day in range(-(-num_rows // DAY_SAMPLES))
            ]  # fmt: skip
            try:
                for day in days:
                    day.result()
            finally:
                pool.shutdown(cancel_futures=True)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def cached_bags(
    num_rows: int,
    seed: int = 0,
    cache_dir: str | os.PathLike | None = None,
    *,
    table_rows: Sequence[int] = TABLE_ROWS,
    bag_sizes: Sequence[int] = BAG_SIZES,
    is_uniform: bool = False,
) -> pathlib.Path:
    """Gives the folder of `write_bags`, written by the first call and read by the later ones.

    Args:
      num_rows: samples.
      seed: as of `write_bags`.
      cache_dir: where the folder lies, as of `cache_folder`.
      table_rows: as of `write_bags`.
      bag_sizes: as of `write_bags`.
      is_uniform: as of `write_bags`.
    """
    shape = hashlib.sha256(repr((tuple(table_rows), tuple(bag_sizes))).encode()).hexdigest()[:8]
    keys = "uniform" if is_uniform else "power-law"
    folder = cache_folder(cache_dir) / f"bags-v{_LOG_VERSION}-{num_rows}-rows-seed-{seed}-{keys}-{shape}"
    if not folder.exists():
        try:
            write_bags(folder, num_rows, seed, table_rows=table_rows, bag_sizes=bag_sizes, is_uniform=is_uniform)
        except OSError:
            if not folder.exists():  # else another process has written it meanwhile
                raise
    return folder


def planted_logit(integers: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Gives the logit from which the label of a synthetic row was drawn: the best that any model can know.

    Every key has a hidden effect (a function of its column and itself), a few pairs of columns have a product of
    hidden signs, and the integers add linearly; a missing value adds nothing.

    Args:
      integers: float32 [rows, 13], as the readers give them.
      categories: int64 [rows, 26].

    Returns:
      float64 [rows].
    """
    logit = np.full(len(integers), _BIAS)
    signs = {}
    for column in range(NUM_CATEGORIES):
        keys = categories[:, column]
        hashes = mix(keys.astype(np.uint32) ^ np.uint32(0x9E3779B9 * (column + 1) % 2**32))
        uniform = hashes * 2.0**-32 - 0.5
        is_present = keys != MISSING_KEY
        logit += is_present * uniform * (np.sqrt(12) * _KEY_EFFECT)
        # The lowest bit is as good as independent of the size of the hash.
        signs[column] = is_present * ((hashes & np.uint32(1)) * 2.0 - 1.0)
    for left, right in _PAIRS:
        logit += _PAIR_EFFECT * signs[left] * signs[right]
    signs_of_integers = 1 - 2 * (np.arange(NUM_INTEGERS) % 2)
    return logit + integers @ (_INTEGER_EFFECT * signs_of_integers)


def _draw_integers(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws raw integers [13, rows], which of them are missing, and what the readers make of them [rows, 13]."""
    raw, is_missing = np.empty((NUM_INTEGERS, num_rows), np.int64), np.empty((NUM_INTEGERS, num_rows), bool)
    for i in range(NUM_INTEGERS):
        spread = 1.0 + 0.15 * i  # from counts of a few to counts of thousands, as in Criteo's columns
        raw[i] = np.minimum(np.exp(rng.normal(1.0, spread, num_rows)) - (2 if i == 1 else 0), 1 << 24)
        is_missing[i] = rng.random(num_rows) < _MISSING_INTEGERS[i]
    integers = np.where(is_missing, 0, np.log1p(np.maximum(raw, 0))).astype(np.float32).T
    return raw, is_missing, integers


def _draw_labels(rng: np.random.Generator, integers: np.ndarray, categories: np.ndarray) -> np.ndarray:
    return rng.random(len(integers)) < 1.0 / (1.0 + np.exp(-planted_logit(integers, categories)))


def _write_day(
    folder: pathlib.Path,
    day: int,
    num_rows: int,
    seed: int,
    table_rows: Sequence[int],
    bag_sizes: Sequence[int],
    is_uniform: bool,
) -> None:
    rng = np.random.default_rng([seed, day])
    firsts = np.empty((NUM_CATEGORIES, num_rows), np.int64)
    bags = {}
    for i, (rows, size) in enumerate(zip(table_rows, bag_sizes, strict=True)):
        bags[str(i)] = draw_bags(rng, num_rows, i, rows, size, is_uniform=is_uniform)
        firsts[i] = bags[str(i)][:, 0]
    _, _, integers = _draw_integers(rng, num_rows)
    label = _draw_labels(rng, integers, firsts.T)
    np.save(folder / f"day_{day}_labels.npy", label.astype(np.int32)[:, None])
    np.save(folder / f"day_{day}_dense.npy", np.ascontiguousarray(integers))
    np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **bags)


def _write_chunk(file: io.BufferedIOBase, rng: np.random.Generator, num_rows: int, max_cardinality: int) -> None:
    raw, is_missing, integers = _draw_integers(rng, num_rows)
    keys = np.empty((NUM_CATEGORIES, num_rows), np.int64)
    for i in range(NUM_CATEGORIES):
        ranks = power_law_ranks(rng, num_rows, min(CARDINALITIES[i], max_cardinality))
        keys[i] = mix(ranks + np.uint32(i << 25))
        keys[i, rng.random(num_rows) < _MISSING_CATEGORIES[i]] = MISSING_KEY
    label = _draw_labels(rng, integers, keys.T)
    columns = [pa.array(label.astype(np.int8))]
    columns += [pa.array(values, mask=mask) for values, mask in zip(raw, is_missing, strict=True)]
    columns += [_hex_strings(column) for column in keys]
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pa.csv.write_csv(pa.table(columns, names=list(COLUMN_NAMES)), file, options)


def _words(digit: int) -> np.uint64:
    """The byte `digit`, eight times."""
    return np.uint64(digit * 0x0101010101010101)


def _hex_strings(keys: np.ndarray) -> pa.Array:
    """Writes keys as 8 hexadecimal digits each, empty where missing."""
    words = keys.view(np.uint64) & np.uint64(0xFFFFFFFF)
    words = ((words >> np.uint64(16)) | (words << np.uint64(32))) & np.uint64(0x0000FFFF0000FFFF)
    words = ((words >> np.uint64(8)) | (words << np.uint64(16))) & np.uint64(0x00FF00FF00FF00FF)
    words = ((words >> np.uint64(4)) | (words << np.uint64(8))) & _words(0x0F)
    is_letter = ((words + _words(0x06)) >> np.uint64(4)) & _words(1)
    text = words + _words(ord("0")) + is_letter * np.uint64(ord("a") - ord("0") - 10)
    offsets = np.arange(0, 8 * (len(keys) + 1), 8, dtype=np.int32)
    strings = pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(text))
    return pa.compute.if_else(pa.array(keys == MISSING_KEY), None, strings)
