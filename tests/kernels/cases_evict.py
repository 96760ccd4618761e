"""Cases of eviction: select and release. See kernel_scripts.py."""

import numpy as np
from kernel_model import ADAGRAD, ADAM, U64, as_keys
from kernel_scripts import Script, case, cases, table_store

# Eviction: select, release -------------------------------------------------------------------------------------


def score_words(script: Script, kind: str) -> tuple[np.ndarray, ...]:
    """Returns scores for every row of capacity, in use or not."""
    rng, num = script.rng, script.store.capacity
    some = rng.integers(0, 2**32, num, dtype=np.uint32)
    return {
        "equal": (np.full(num, 2**32 - 1, np.uint32),),
        "steps": (rng.integers(1000, 1100, num).astype(np.uint32),),
        "spread": (some,),
        "low_bits": (some & np.uint32(0x3FF),),
        "pairs": (rng.integers(0, 3, num).astype(np.uint32), some),
        "second_equal": (some % np.uint32(5), np.zeros(num, np.uint32)),
        "high_bits": (some & np.uint32(0xC0000000), some << np.uint32(31)),
    }[kind]


SCORES = ("equal", "steps", "spread", "low_bits", "pairs", "second_equal", "high_bits")


@cases(*SCORES)
def evict_scores(kind: str) -> Script:
    """Uses budgets from none to more than exist, for all tables and for one; then the freed rows are reused."""
    script = table_store(1000, SCORES.index(kind), seed=SCORES.index(kind), optimizer=SCORES.index(kind) % 4)
    store = script.store
    keys = np.r_[script.distinct(1500, low=int(script.rng.integers(2**40))), as_keys([0, 2**63, 2**64 - 2])]
    script.fill(keys, script.rng.integers(0, store.num_tables, len(keys)))
    words = score_words(script, kind)
    for num_kept in (0, 1, 700, len(keys) - 1, len(keys), 2**32 - 1):
        script.evict_select(words, num_kept)
    of_one = script.evict_select(words, 3, table=store.num_tables - 1)
    script.evict_release(of_one)
    script.find_or_insert(script.rng.permutation(keys)[:600], script.rng.integers(0, store.num_tables, 600))
    script.evict_release(script.evict_select(words, 400), has_evicted=False)
    script.find(keys, script.rng.integers(0, store.num_tables, len(keys)))
    script.find_or_insert(script.distinct(600, low=5))
    return script


@cases("none", "some", "all")
def evict_mask(which: str) -> Script:
    """Masks only rows in use, of all tables and of one; if no row leaves, even the index is unchanged."""
    script = Script(slabs=(5, 7, 1000), num_tables=3, optimizer=ADAM)
    keys = script.distinct(800, low=3)
    script.fill(keys, np.arange(800) % 3)
    share = {"none": 2.0, "some": 0.7, "all": 0.0}[which]
    mask = script.rng.random(script.store.capacity) >= share
    script.find_or_insert(np.r_[keys[:50], script.distinct(50, low=2)], np.arange(100) % 3)
    script.evict_release(script.evict_select((), table=1, mask=mask), has_statistics=False)
    script.evict_release(script.evict_select((), mask=mask))
    script.find_or_insert(keys[::-1], np.arange(800) % 3)
    script.evict_release(np.zeros(script.store.capacity))
    return script


@cases(90, 110, 200)
def evict_crowded_index(num_buckets: int) -> Script:
    """Makes long walks, also across the index's end: entries are removed, and later entries move up."""
    script = Script(slabs=(5, 7, 300), num_tables=3, num_buckets=num_buckets, optimizer=ADAGRAD)
    aimed = script.keys_of_homes([num_buckets - 2, num_buckets - 1], 60)
    others = script.distinct(250, low=3)
    script.fill(np.r_[aimed, others], np.r_[np.zeros(60, int), np.arange(250) % 3])
    for share in (0.1, 0.5, 0.9):
        flags = (script.rng.random(script.store.capacity) < share).astype(np.uint8)
        script.evict_release(flags)
        script.find(np.r_[aimed, others], np.r_[np.zeros(60, int), np.arange(250) % 3])
        script.find_or_insert(script.rng.permutation(aimed)[:20])
    return script


@case()
def evict_unplaced() -> Script:
    """Starts with rows without an entry: the index is rebuilt, and they are found again."""
    script = Script(slabs=(5, 7, 300), num_buckets=20)
    keys = script.distinct(90, low=1)
    script.find_or_insert(keys)
    script.evict_release(np.arange(script.store.capacity) % 4 == 0)
    script.find(keys)
    script.evict_release(np.arange(script.store.capacity) % 4 == 1)
    script.find_or_insert(keys)
    return script


@case()
def evict_large() -> Script:
    """Uses scores with thousands of ties, and keys that differ in their last bits."""
    script = Script(slabs=(7_000, 14_000), dim=1, num_tables=2, num_buckets=1 << 13)
    keys = np.arange(20_000).astype(U64) + (U64(3) << U64(60))
    script.fill(script.rng.permutation(keys), np.arange(20_000) % 2)
    steps = (script.rng.integers(0, 5, script.store.capacity).astype(np.uint32),)
    script.evict_select(steps, 19_900)
    script.evict_release(script.evict_select(steps, 9_000))
    script.find_or_insert(keys[:3000], np.arange(3000) % 2)
    return script


@cases(3, 70)
def small_evict(num_tables: int) -> Script:
    """Evicts by score and by mask."""
    script = Script(slabs=(5, 7, 100), num_tables=num_tables, dim=5, optimizer=ADAM)
    script.fill(script.distinct(90), np.arange(90) % num_tables)
    words = score_words(script, "pairs")
    script.evict_release(script.evict_select(words, 60))
    script.evict_release(script.evict_select(words[:1], 1, table=2))
    mask = np.arange(script.store.capacity) % 5 == 0
    script.evict_release(script.evict_select((), mask=mask), has_statistics=False, has_evicted=False)
    script.evict_release(np.zeros(script.store.capacity))
    script.find_or_insert(script.distinct(40))
    return script
