"""Cases of plans: the requests of a batch by owner. See kernel_scripts.py."""

import numpy as np
from kernel_model import (
    MEAN,
    NUM_PARTITIONS,
    PADDING_KEY,
    SUM,
    Batch,
    as_keys,
    fixed,
    key_of_hash,
    partition_hashes,
    ragged,
    single,
)
from kernel_scripts import KINDS, SIZES, Script, batch_with_loose_ends, case, cases

# Requests: plan_requests, gather -------------------------------------------------------------------------------


NUM_SHARDS = (1, 2, 3, 8, 64)


def batch_of_tables(script: Script, keys: np.ndarray) -> Batch:
    """The same keys in three tables: single, in bags of one size, in ragged bags with loose positions."""
    n = len(keys)
    offsets = np.r_[n // 5, np.sort(script.rng.integers(n // 5, n - n // 6 + 1, n // 4)), n - n // 6]
    fives = n // 5 * 5
    return Batch(single(keys, 0), fixed(keys[::-1][:fives], 1, MEAN, 5), ragged(np.roll(keys, 7), 2, SUM, offsets))


@cases(*SIZES)
def requests_sizes(num_keys: int) -> Script:
    """Around the sizes of warps, blocks and chunks, for several numbers of shards."""
    number = SIZES.index(num_keys)
    script = Script(num_tables=3, seed=num_keys)
    batch = batch_of_tables(script, script.mixed(num_keys, range(20)))
    for num_shards in (NUM_SHARDS[number % 5], NUM_SHARDS[(number + 2) % 5]):
        script.plan_requests(batch, num_shards)
    return script


@cases(*NUM_SHARDS, 5, 1000, 65536)
def requests_shards(num_shards: int) -> Script:
    """Every number of shards, with keys of all partitions; most of the last have no owner of a key."""
    script = Script(num_tables=3, seed=num_shards)
    script.plan_requests(batch_of_tables(script, script.mixed(1500, range(200))), num_shards)
    return script


@case()
def requests_large() -> Script:
    """More blocks than a block has threads; more positions than any chunk of the CPU; keys used often and once."""
    script = Script(num_tables=2)
    keys = (2.0 ** script.rng.uniform(0, 24, 300_000)).astype(np.uint64)
    batch = Batch(single(keys[:200_000], 0), fixed(keys[200_000:], 1, MEAN, 10))
    script.plan_requests(batch, 8, on={1: 3})
    return script


@cases(*KINDS)
def requests_kinds(kind: str) -> Script:
    """Keys that a careless plan confuses."""
    script = Script(slabs=(5, 7, 2500), num_tables=3)
    _, keys = KINDS[kind](script, 1000)
    script.plan_requests(batch_of_tables(script, as_keys(keys)), 8)
    return script


@case()
def requests_one_key() -> Script:
    """One request, used 5,000 times; each table has another owner for it, or the same."""
    script = Script(num_tables=3)
    script.plan_requests(batch_of_tables(script, np.full(5000, 2**63, np.uint64)), 64)
    return script


@case()
def requests_one_owner() -> Script:
    """All keys of one shard, whichever: the others get none."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mixed(700, range(200)))
    for owner in (0, 2, 7):
        script.plan_requests(batch, 8, owners=owner)
    script.plan_requests(batch, 8, on={0: 5, 1: 5, 2: 5})
    return script


@case()
def requests_pinned() -> Script:
    """Tables that lie on one shard beside one that is spread; owners in any order; the first and the last shard."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mixed(700, range(200)))
    script.plan_requests(batch, 3, on={1: 0})
    script.plan_requests(batch, 8, owners=script.rng.integers(0, 8, NUM_PARTITIONS), on={0: 7, 2: 0})
    script.plan_requests(batch, 1, on={0: 0, 1: 0})
    return script


@case()
def requests_wrong_owners() -> Script:
    """Owners beyond the last shard, which Python refuses: they count as the last, and nothing outside is touched."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mixed(700, range(200)))
    script.plan_requests(batch, 3, owners=script.rng.integers(0, 2**32, NUM_PARTITIONS), on={1: 2**32 - 2})
    script.plan_requests(batch, 1, owners=7, on={1: 3})
    return script


@case()
def requests_equal_hashes() -> Script:
    """Keys of three tables with one hash stay by first position; a real hash of all ones comes before the padding."""
    script = Script(num_tables=3)
    lines = script.store.tables
    hashes = [2**64 - 1, 0, 1, 2**52 - 1, 2**52, 2**63, *map(int, script.rng.integers(0, 2**63, 60))]
    keys = [as_keys([key_of_hash(h, line) for h in script.rng.permutation(as_keys(hashes)).tolist()]) for line in lines]
    assert np.array_equal(np.sort(partition_hashes(keys[1], np.resize(lines[1], (66, 16)))), np.sort(as_keys(hashes)))
    padded = [np.r_[one[:30], np.full(7, PADDING_KEY, np.uint64), one[30:], one[:9]] for one in keys]
    batch = Batch(single(padded[2], 2), single(padded[0], 0), fixed(padded[1], 1, SUM, 2))
    for num_shards in (1, 8):
        script.plan_requests(batch, num_shards)
        script.plan_requests(batch, num_shards, owners=0)
    return script


@case()
def requests_padding() -> Script:
    """Padding, and keys in no bag: no request."""
    script = Script(num_tables=3)
    batch = Batch(
        single(np.full(300, PADDING_KEY, np.uint64), 0),
        ragged(range(64), 1, SUM, [64]),
        ragged(range(64), 2, SUM, [9, 9, 9]),
    )
    for num_shards in (1, 3):
        script.plan_requests(batch, num_shards)
    return script


@case()
def requests_odd_bags() -> Script:
    """Keys before the first bag and after the last one are padding, whatever they are."""
    script = Script(num_tables=3)
    script.plan_requests(batch_with_loose_ends(lambda num, *_: script.rng.integers(0, 40, num)), 8)
    return script


@case()
def requests_70_tables() -> Script:
    """Each with keys of the same numbers, and some on one shard."""
    script = Script(num_tables=70)
    keys = script.rng.integers(0, 12, (70, 30))
    script.plan_requests(Batch(*(single(keys[t], t) for t in range(70))), 8, on={t: t % 8 for t in range(0, 70, 3)})
    return script


@cases(0, 300)
def small_plan(num_keys: int) -> Script:
    """Distinct keys over two blocks and two tables."""
    script = Script(num_tables=2)
    keys = script.mixed(num_keys, range(5))
    script.plan(Batch(single(keys, 0), ragged(keys, 1, SUM, [0, num_keys // 2, num_keys])))
    return script


@cases(0, 300)
def small_requests(num_keys: int) -> Script:
    """Several shards, and one; a table that lies on one of them."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mixed(num_keys, range(50)))
    for num_shards in (1, 3):
        script.plan_requests(batch, num_shards, on={2: 0})
    return script
