"""Cases of tables: find, insert, release, rebuild; gather, scatter and touch of rows. See kernel_scripts.py."""

import numpy as np
from kernel_model import (
    ADAGRAD,
    ADAM,
    BF16,
    F16,
    F32,
    FREE_BEGIN,
    FREE_END,
    LONGEST_PROBE,
    NO_ROW,
    NUM_ALLOCATED,
    PADDING_KEY,
    ROWWISE_ADAGRAD,
    U64,
    as_keys,
)
from kernel_scripts import DIMS, KINDS, SIZES, SLABS, Script, case, cases, gather_mixed, table_store

# Tables: find, find_or_insert, release, rebuild ----------------------------------------------------------------


@cases(*SIZES)
def table_sizes(num_keys: int) -> Script:
    """Uses sizes around those of warps, blocks and chunks: insert, find, erase, insert again."""
    number = SIZES.index(num_keys)
    script = table_store(num_keys, number, seed=num_keys)

    def tables_of(num):
        return script.rng.integers(0, script.store.num_tables, num)

    present = script.distinct(max(num_keys, 3) // 3, low=9)
    script.fill(present, tables_of(len(present)))
    keys, tables = script.mix_keys(num_keys, present), tables_of(num_keys)
    script.find_or_insert(keys, tables)
    script.find(script.rng.permutation(keys), tables)
    script.erase(script.rng.permutation(keys), tables)
    script.find_or_insert(script.rng.permutation(keys), tables)
    script.find(keys, tables)
    return script


@cases(*KINDS)
def table_kinds(kind: str) -> Script:
    """Uses keys that a careless table confuses, in three tables, then with another salt and another index size."""
    script = table_store(1000, 1, seed=1, optimizer=ADAM)
    present, keys = KINDS[kind](script, 1000)
    tables = np.zeros(1000, np.int64) if "home" in kind or "one" in kind else script.rng.integers(0, 3, 1000)
    script.fill(np.repeat(as_keys(present), 3), np.tile(np.arange(3), len(present)))
    script.find(keys, tables)
    script.find_or_insert(keys, tables)
    script.find(keys, (tables + 1) % 3)
    script.rebuild(700, salt=99)
    script.find_or_insert(script.rng.permutation(keys), tables)
    script.erase(np.where(np.arange(1000) % 3, keys, U64(12345)), tables)
    script.find(keys, tables)
    script.find_or_insert(keys[::-1], tables)
    return script


@case()
def table_large() -> Script:
    """Uses more blocks of 1,024 keys, and of 1,024 rows, than a block has threads; most rows are freed."""
    script = Script(slabs=(100_000, 200_000), dim=1, num_tables=1, num_buckets=1 << 13)
    script.fill(np.arange(1000))
    store = script.store
    store.records[:289_000, 3] = np.arange(1000, 290_000)
    store.counters[[NUM_ALLOCATED, FREE_BEGIN, FREE_END]] = 290_000, 0, 289_000
    keys = script.rng.integers(0, 12_000, 300_000)
    script.find_or_insert(keys)
    script.erase(script.rng.integers(6000, 20_000, 300_000))
    script.find_or_insert(keys)
    return script


@case()
def table_slabs() -> Script:
    """Uses as many slabs as a store can have, of one row and of a hundred."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), dim=3, num_tables=3, optimizer=ADAGRAD)
    keys = script.rng.permutation(np.arange(1000))
    script.find_or_insert(keys, np.arange(1000) % 3)
    script.erase(keys[:1000:7], np.arange(0, 1000, 7) % 3)
    script.find_or_insert(keys[::-1], np.arange(1000) % 3)
    return script


@case()
def table_one_key() -> Script:
    """Uses a key that is new, then present, then erased and new again."""
    script = table_store(5000, SIZES.index(5000), seed=2)
    script.fill(script.distinct(100), 0)
    keys = np.full(5000, 2**64 - 2, np.uint64)
    for call in (script.find_or_insert, script.find, script.find_or_insert, script.erase, script.find_or_insert):
        call(keys)
    return script


@case()
def table_unknown_tables() -> Script:
    """Uses table numbers that the store does not have: nothing is found, inserted or changed."""
    script = Script(slabs=(5, 7, 300), num_tables=3)
    script.fill(range(40), np.arange(40) % 3)
    keys, tables = np.arange(33), np.resize([0, 1, 2, 3, 2**24, 2**31, 2**32 - 2, 2**32 - 1], 33)
    script.find(keys, tables)
    script.find_or_insert(keys, tables)
    script.erase(keys, tables)
    script.find_or_insert(np.where(keys % 2, U64(PADDING_KEY), as_keys(keys)), tables)
    return script


@case()
def table_few_rows_left() -> Script:
    """The first new keys by position get the remaining rows; then none is left; then freed rows, ascending."""
    script = Script(slabs=(5, 7), num_tables=3, optimizer=ADAGRAD)
    rng = script.rng
    tables = rng.integers(0, 3, 33)
    script.fill(range(7), 0)
    script.find_or_insert(np.r_[np.arange(30, 40), rng.integers(0, 20, 23)], np.r_[np.zeros(10, int), tables[10:]])
    script.find_or_insert(rng.integers(0, 60, 33), tables)
    script.erase([3, 6, 0, 31, 2**50, PADDING_KEY])
    script.find_or_insert(np.resize([2**40, 3, 2**41, 2**42, 0, 2**43], 33), 0)
    script.erase([1, 2**40, 4])
    script.find_or_insert(np.resize([77, PADDING_KEY, 78, 77], 33), tables % 2)
    script.find_or_insert(np.arange(100, 133), tables)
    return script


@cases(33, 257, 5000)
def table_far_too_many(num_keys: int) -> Script:
    """Uses more new keys than rows, and than entries in the index: eight get rows, the others leave no entry."""
    script = Script(slabs=(8,), num_tables=1, num_buckets=16)
    keys = script.distinct(num_keys)
    script.find_or_insert(keys)
    script.find_or_insert(keys[::-1])
    script.find(keys)
    return script


@cases(1, 2, 3)
def table_crowded_index(num_buckets: int) -> Script:
    """Uses an index with fewer entries than rows: keys without an entry are refused and counted separately."""
    script = Script(slabs=(5, 7, 300), num_tables=3, num_buckets=num_buckets)
    keys = script.distinct(20, low=3)
    script.fill(keys[:3], np.arange(3))
    asked = script.rng.choice(keys, 257)
    script.find_or_insert(asked, np.arange(257) % 3)
    script.find(asked, np.arange(257) % 3)
    script.find_or_insert(asked[::-1], np.arange(257) % 3)
    script.rebuild(160)
    script.find_or_insert(asked, np.arange(257) % 3)
    return script


@cases(100, 4095)
def table_aimed(bucket: int) -> Script:
    """Uses more keys of one home than a walk is long: the first 256 get entries; erasing makes room for more."""
    script = Script(slabs=(5, 7, 588), num_buckets=4096, num_tables=1)
    rng = script.rng
    aimed = rng.permutation(script.keys_of_homes([bucket], 300))
    keys = rng.permutation(np.r_[aimed, script.distinct(100)])
    script.find_or_insert(keys)
    script.find_or_insert(rng.permutation(np.r_[keys[:350], np.full(50, aimed[-1])]))
    script.find(keys)
    placed = [key for key in aimed.tolist() if (0, key) in script.store.row_of]
    script.erase(placed[10:60])
    script.find_or_insert(keys)
    script.find(keys)
    return script


@case()
def table_aimed_around() -> Script:
    """Uses overlapping walks: entries depend on the order, which is that of the positions."""
    script = Script(slabs=(5, 7, 588), num_buckets=4096, num_tables=1)
    aimed = script.keys_of_homes(range(4090, 4098 - 2), 320)
    keys = script.rng.permutation(np.r_[aimed, script.distinct(80)])
    script.find_or_insert(keys)
    script.find_or_insert(keys[::-1])
    script.find(keys)
    return script


@cases(1, 4, 5, 33, 128, 255, 256)
def table_longest_walk(num_keys: int) -> Script:
    """Keys of one home fill bucket after bucket, in any order, so the longest walk is known exactly."""
    script = Script(slabs=(5, 307), num_buckets=512)
    script.has_exact_probes = True
    keys = np.resize(script.keys_of_homes([500], num_keys), 256)
    script.find_or_insert(keys)
    script.rebuild(512)
    script.erase(keys[:1])
    return script


@case()
def table_longest_walk_present() -> Script:
    """A find_or_insert of present keys also walks, and reports the length."""
    script = Script(slabs=(5, 307), num_buckets=512)
    script.has_exact_probes = True
    keys = script.keys_of_homes([3], 32)
    script.fill(keys)
    script.store.counters[LONGEST_PROBE] = 0
    script.find_or_insert(keys)
    return script


@case()
def table_erase_all() -> Script:
    """Frees every row and reuses it, ascending; twice."""
    script = Script(slabs=(5, 7, 300), num_tables=3, optimizer=ROWWISE_ADAGRAD)
    rng = script.rng
    keys, tables = script.distinct(312, low=1), np.arange(312) % 3
    script.fill(keys[:200], tables[:200])
    for _ in range(2):
        script.find_or_insert(keys, tables)
        script.erase(keys, tables)
        order = rng.permutation(312)
        script.find_or_insert(keys[order] + U64(rng.integers(2)), tables[order])
    return script


@case()
def table_erase_in_parts() -> Script:
    """Freed rows of several erasures are one ascending list, used up before new rows."""
    script = Script(slabs=(5, 7, 300), num_tables=1, optimizer=ADAM)
    keys = script.distinct(200, low=1)
    script.fill(keys)
    for part in (keys[150:160], keys[20:50], keys[145:155], keys[:33]):
        script.erase(part)
        script.find_or_insert(script.distinct(33, low=int(part[0]) + 2**50)[:12])
    return script


@case()
def table_erase_absent() -> Script:
    """Some of the freed rows are in use again and no row is erased: generation, rows and list stay."""
    script = Script(slabs=(5, 7, 300), optimizer=ADAGRAD)
    script.fill(range(100))
    script.erase(np.arange(40, 73))
    script.find_or_insert(np.resize(np.arange(1000, 1010), 33))
    script.erase(np.arange(5000, 5033))
    script.find_or_insert(np.arange(2000, 2033))
    return script


GATHER_DIMS = (*DIMS, 130)


@cases(*GATHER_DIMS)
def gather_dims(dim: int) -> Script:
    """Covers every shape of a row, from one slab, two or three; tables with all kinds of initializers."""
    number = GATHER_DIMS.index(dim)
    return gather_mixed(Script(slabs=SLABS[number % 3], dim=dim, num_tables=3 + number % 2, seed=dim), 150, (1,))


@cases(*SIZES)
def gather_sizes(num_keys: int) -> Script:
    """Uses sizes around those of warps and blocks; more tables than the GPU counts in shared memory."""
    number = SIZES.index(num_keys)
    script = Script(slabs=SLABS[number % 3], dim=(8, 3, 64)[number % 3], num_tables=(1, 3, 70)[number % 3])
    return gather_mixed(script, num_keys, range(0, script.store.num_tables, 2))


@case()
def gather_slabs() -> Script:
    """Uses as many slabs as a store can have, of one row and of a hundred: every row, the slabs' ends first."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), dim=12, num_tables=1)
    script.fill(np.arange(640))
    script.gather(np.arange(1300), 0, np.r_[np.arange(650), np.arange(650)[::-1]])
    return script


@cases("present", "absent", "padding", "of_no_table")
def gather_all(what: str) -> Script:
    """Uses uniform warps: only rows, only new rows, only zeros."""
    script = Script(slabs=(5, 7, 300), dim=64, num_tables=3)
    script.fill(range(60), np.arange(60) % 3)
    keys = np.full(700, PADDING_KEY, np.uint64) if what == "padding" else np.arange(700)
    tables = np.full(700, 3) if what == "of_no_table" else np.arange(700) % 3
    row_ids = np.full(700, NO_ROW) if what == "absent" else script.rng.integers(0, 312, 700)
    script.gather(keys, tables, row_ids, np.arange(700), (0, 2))
    return script


@case()
def gather_large() -> Script:
    """Uses more blocks than fit any GPU at once; all of them count for one table."""
    script = Script(slabs=(100_000, 50_000), dim=4, num_buckets=1 << 14)
    script.fill(range(1000))
    script.store.rows[:] = script.normal(150_000, 4)
    script.gather(np.arange(300_000), 0, script.rng.integers(0, 200_000, 300_000), 3)
    return script


# Scatters: rows of bytes into per-row arrays -------------------------------------------------------------------


@cases(*SIZES)
def scatter_sizes(num_keys: int) -> Script:
    """Uses every row size in bytes that the GPU distinguishes, all dtypes; repeated rows and absent rows."""
    number = SIZES.index(num_keys)
    script = Script(slabs=SLABS[number % 3], num_tables=1, seed=number)
    rng = script.rng
    for width, dtype in ((1, F32), (2, np.uint32), (3, F32), (64, F32), (1, F16), (3, BF16), (4, BF16), (128, F16)):
        absent = rng.choice([NO_ROW, NO_ROW - 1, 312, 2**31], num_keys)
        script.scatter(np.where(rng.random(num_keys) < 0.2, absent, rng.integers(0, 312, num_keys)), width, dtype)
    return script


@case()
def scatter_slabs() -> Script:
    """Uses as many slabs as a store can have: every row, the slabs' ends first."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), num_tables=1)
    script.scatter(np.r_[np.arange(660), np.arange(660)[::-1]], 8, F32)
    return script


@case()
def scatter_large() -> Script:
    """Uses more vectors than the GPU's grid has threads."""
    script = Script(slabs=(100_000, 50_000), dim=1, num_buckets=16)
    script.scatter(script.rng.integers(0, 160_000, 200_000), 12, F32)
    return script


# Touches: statistics of rows -----------------------------------------------------------------------------------


@cases(*SIZES)
def touch_sizes(num_keys: int) -> Script:
    """Uses sizes around those of warps and blocks: few rows and many, absent rows, with uses and without."""
    number = SIZES.index(num_keys)
    script = Script(slabs=SLABS[number % 3], num_tables=1, seed=number)
    rng = script.rng
    for num_rows in (1, 3, 40, 312):
        absent = rng.choice([NO_ROW, NO_ROW - 1, 312, 2**31], num_keys)
        row_ids = np.where(rng.random(num_keys) < 0.2, absent, rng.integers(0, num_rows, num_keys))
        script.touch(row_ids, clock=num_rows)
        script.touch(row_ids, np.where(rng.random(num_keys) < 0.1, 2**27 - 1, rng.integers(0, 9, num_keys)), 2**32 - 1)
    return script


@cases("one_row", "all_absent", "each_row_of_a_warp_once", "pairs_in_a_warp", "no_uses")
def touch_warps(what: str) -> Script:
    """Uses uniform warps, and warps with groups of every kind."""
    script = Script(slabs=(5, 7, 300), num_tables=1)
    i = np.arange(2000)
    row_ids = {
        "one_row": np.full(2000, 6),
        "all_absent": np.full(2000, NO_ROW),
        "each_row_of_a_warp_once": i % 32 + 3,
        "pairs_in_a_warp": i % 32 // 2 * 19,
        "no_uses": i % 5,
    }[what]
    script.touch(row_ids)
    script.touch(row_ids, 0 if what == "no_uses" else i % 4)
    return script


@case()
def touch_slabs() -> Script:
    """Uses as many slabs as a store can have: every row, the slabs' ends first."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), num_tables=1)
    script.touch(np.r_[np.arange(660), np.arange(660)[::-1]], np.arange(1320))
    return script


@case()
def touch_large() -> Script:
    """Uses more positions than the GPU's grid has threads; every ninth position is a hot row."""
    script = Script(slabs=(100_000, 50_000), dim=1, num_buckets=16)
    rng = script.rng
    row_ids = np.where(rng.random(700_000) < 0.11, 77, rng.integers(0, 160_000, 700_000))
    script.touch(row_ids)
    script.touch(row_ids, rng.integers(0, 2**27, 700_000, np.uint32))
    return script


@cases(3, 70)
def small_table(num_tables: int) -> Script:
    """Runs find, find_or_insert, release and rebuild in the normal case."""
    script = Script(slabs=(5, 7, 100), num_tables=num_tables, dim=5, optimizer=ADAM)
    tables = script.rng.integers(0, num_tables, 48)
    script.fill(range(20), np.arange(20) % 3)
    keys = script.mix_keys(48, range(20))
    script.find_or_insert(keys, tables)
    script.erase(keys[:20], tables[:20])
    script.find_or_insert(keys, tables)
    script.rebuild(30, salt=5)
    script.find(keys, tables)
    return script


@case()
def small_scatter() -> Script:
    """Uses vectors of all widths, into three slabs."""
    script = Script(slabs=(5, 7, 300), num_tables=1)
    for width, dtype in ((4, F32), (2, F32), (1, F32), (3, BF16)):
        script.scatter(script.rng.integers(0, 330, 300), width, dtype)
    return script


@case()
def small_touch() -> Script:
    """Touches with uses and without, from three slabs."""
    script = Script(slabs=(5, 7, 300), num_tables=1)
    row_ids = script.rng.integers(0, 330, 600)
    script.touch(row_ids)
    script.touch(row_ids % 9, script.rng.integers(0, 9, 600), clock=0)
    return script


@cases("full", "crowded")
def small_table_refusing(why: str) -> Script:
    """Runs out of rows, or of entries."""
    script = Script(slabs=(5, 7), dim=8, num_buckets=16 if why == "full" else 2)
    for keys in (range(10, 42), range(32)):
        script.find_or_insert(keys)
    return script


@cases(4, 7, 72)
def small_gather(dim: int) -> Script:
    """Gathers rows, new rows and zeros, over two blocks."""
    return gather_mixed(Script(slabs=(5, 7, 100), dim=dim, num_tables=3), 300, (0,))
