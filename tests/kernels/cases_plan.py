"""Cases of plans: the requests of a batch, and the uses of its bags, by owner. See kernel_scripts.py."""

import numpy as np
from kernel_model import (
    F32,
    MEAN,
    NUM_PARTITIONS,
    PADDING_KEY,
    SQRTN,
    SUM,
    Batch,
    as_keys,
    key_of_hash,
    make_fixed,
    make_ragged,
    partition_hashes,
    single,
)
from kernel_scripts import KINDS, SIZES, Script, batch_with_loose_ends, case, cases

# Requests: plan_requests, gather -------------------------------------------------------------------------------


NUM_SHARDS = (1, 2, 3, 8, 64)


def batch_of_tables(script: Script, keys: np.ndarray) -> Batch:
    """Returns the same keys in three tables: single, in bags of one size, in ragged bags with loose positions."""
    n = len(keys)
    offsets = np.r_[n // 5, np.sort(script.rng.integers(n // 5, n - n // 6 + 1, n // 4)), n - n // 6]
    fives = n // 5 * 5
    return Batch(
        single(keys, 0), make_fixed(keys[::-1][:fives], 1, MEAN, 5), make_ragged(np.roll(keys, 7), 2, SUM, offsets)
    )


@cases(*SIZES)
def requests_sizes(num_keys: int) -> Script:
    """Uses sizes around those of warps, blocks and chunks, for several numbers of shards."""
    number = SIZES.index(num_keys)
    script = Script(num_tables=3, seed=num_keys)
    batch = batch_of_tables(script, script.mix_keys(num_keys, range(20)))
    for num_shards in (NUM_SHARDS[number % 5], NUM_SHARDS[(number + 2) % 5]):
        script.plan_requests(batch, num_shards)
    return script


@cases(*NUM_SHARDS, 5, 1000, 65536)
def requests_shards(num_shards: int) -> Script:
    """Uses every number of shards, with keys of all partitions; most of the last shards own no key."""
    script = Script(num_tables=3, seed=num_shards)
    script.plan_requests(batch_of_tables(script, script.mix_keys(1500, range(200))), num_shards)
    return script


@case()
def requests_large() -> Script:
    """Uses more blocks than a block has threads, more positions than any chunk of the CPU, frequent and single keys."""
    script = Script(num_tables=2)
    keys = (2.0 ** script.rng.uniform(0, 24, 300_000)).astype(np.uint64)
    batch = Batch(single(keys[:200_000], 0), make_fixed(keys[200_000:], 1, MEAN, 10))
    script.plan_requests(batch, 8, on={1: 3})
    return script


@cases(*KINDS)
def requests_kinds(kind: str) -> Script:
    """Uses keys that a careless plan confuses."""
    script = Script(slabs=(5, 7, 2500), num_tables=3)
    _, keys = KINDS[kind](script, 1000)
    script.plan_requests(batch_of_tables(script, as_keys(keys)), 8)
    return script


@case()
def requests_one_key() -> Script:
    """Makes one request, used 5,000 times; each table has another owner for it, or the same."""
    script = Script(num_tables=3)
    script.plan_requests(batch_of_tables(script, np.full(5000, 2**63, np.uint64)), 64)
    return script


@case()
def requests_one_owner() -> Script:
    """Gives all keys to one shard: the others get none."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mix_keys(700, range(200)))
    for owner in (0, 2, 7):
        script.plan_requests(batch, 8, owners=owner)
    script.plan_requests(batch, 8, on={0: 5, 1: 5, 2: 5})
    return script


@case()
def requests_pinned() -> Script:
    """Uses tables pinned to the first and the last shard next to a sharded table, with owners in any order."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mix_keys(700, range(200)))
    script.plan_requests(batch, 3, on={1: 0})
    script.plan_requests(batch, 8, owners=script.rng.integers(0, 8, NUM_PARTITIONS), on={0: 7, 2: 0})
    script.plan_requests(batch, 1, on={0: 0, 1: 0})
    return script


@case()
def requests_wrong_owners() -> Script:
    """Uses owners beyond the last shard, which Python refuses: they count as the last, and memory stays in bounds."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mix_keys(700, range(200)))
    script.plan_requests(batch, 3, owners=script.rng.integers(0, 2**32, NUM_PARTITIONS), on={1: 2**32 - 2})
    script.plan_requests(batch, 1, owners=7, on={1: 3})
    return script


@case()
def requests_equal_hashes() -> Script:
    """Keys of three tables with one hash stay by first position; a real hash of all ones precedes the padding."""
    script = Script(num_tables=3)
    lines = script.store.tables
    hashes = [2**64 - 1, 0, 1, 2**52 - 1, 2**52, 2**63, *map(int, script.rng.integers(0, 2**63, 60))]
    keys = [as_keys([key_of_hash(h, line) for h in script.rng.permutation(as_keys(hashes)).tolist()]) for line in lines]
    assert np.array_equal(np.sort(partition_hashes(keys[1], np.resize(lines[1], (66, 16)))), np.sort(as_keys(hashes)))
    padded = [
        np.r_[keys_of_call[:30], np.full(7, PADDING_KEY, np.uint64), keys_of_call[30:], keys_of_call[:9]]
        for keys_of_call in keys
    ]
    batch = Batch(single(padded[2], 2), single(padded[0], 0), make_fixed(padded[1], 1, SUM, 2))
    for num_shards in (1, 8):
        script.plan_requests(batch, num_shards)
        script.plan_requests(batch, num_shards, owners=0)
    return script


@case()
def requests_padding() -> Script:
    """Padding, and keys in no bag, make no request."""
    script = Script(num_tables=3)
    batch = Batch(
        single(np.full(300, PADDING_KEY, np.uint64), 0),
        make_ragged(range(64), 1, SUM, [64]),
        make_ragged(range(64), 2, SUM, [9, 9, 9]),
    )
    for num_shards in (1, 3):
        script.plan_requests(batch, num_shards)
    return script


@case()
def requests_odd_bags() -> Script:
    """Keys before the first bag and after the last are padding, whatever their values."""
    script = Script(num_tables=3)
    script.plan_requests(batch_with_loose_ends(lambda num, *_: script.rng.integers(0, 40, num)), 8)
    return script


@case()
def requests_70_tables() -> Script:
    """Uses 70 tables with keys of the same numbers, some on one shard."""
    script = Script(num_tables=70)
    keys = script.rng.integers(0, 12, (70, 30))
    script.plan_requests(Batch(*(single(keys[t], t) for t in range(70))), 8, on={t: t % 8 for t in range(0, 70, 3)})
    return script


# Uses: plan_uses -------------------------------------------------------------------------------------------------


def batch_of_bags(script: Script, keys: np.ndarray) -> Batch:
    """Returns equal keys in three tables and all combiners: bags of one size, ragged, with weights and loose ends."""
    n = len(keys)
    inner = np.sort(script.rng.integers(n // 5, n - n // 6 + 1, n // 4))
    offsets = np.r_[n // 5, inner, n - n // 6, n - n // 6]
    fives = keys[::-1][: n // 5 * 5]
    return Batch(
        make_fixed(fives, 1, MEAN, 5),
        make_ragged(np.roll(keys, 7), 2, SUM, offsets, script.weights(n)),
        make_ragged(keys, 0, SQRTN, offsets, script.weights(n)),
        make_fixed(fives, 2, SQRTN, 5),
        make_ragged(keys, 1, MEAN, offsets, script.weights(n)),
    )


@cases(*SIZES)
def uses_sizes(num_keys: int) -> Script:
    """Uses sizes around those of warps and blocks, for several numbers of shards."""
    number = SIZES.index(num_keys)
    script = Script(num_tables=3, seed=num_keys)
    batch = batch_of_bags(script, script.mix_keys(num_keys, range(20)))
    for num_shards in (NUM_SHARDS[number % 5], NUM_SHARDS[(number + 2) % 5]):
        script.plan_uses(batch, num_shards)
    return script


@cases(*NUM_SHARDS, 5, 1000)
def uses_shards(num_shards: int) -> Script:
    """Uses every number of shards, with keys of all partitions; most of the last shards have no use."""
    script = Script(num_tables=3, seed=num_shards)
    script.plan_uses(batch_of_bags(script, script.mix_keys(700, range(200))), num_shards)
    return script


@cases(255, 256, 257, 511, 513)
def uses_of_many_bags(num_bags: int) -> Script:
    """Uses numbers of bags around that of a tile; bags of one key, and of none or some."""
    script = Script(num_tables=2, seed=num_bags)
    lengths = script.rng.integers(0, 4, num_bags)
    keys = script.mix_keys(int(lengths.sum()), range(90))
    singles = make_fixed(script.mix_keys(num_bags, range(90)), 1, MEAN, 1, script.weights(num_bags))
    script.plan_uses(Batch(singles, make_ragged(keys, 0, SQRTN, np.cumsum(np.r_[0, lengths]))), 3)
    return script


@cases(1, 7, 8, 9, 31, 33, 255, 257, 3000)
def uses_of_one_bag(hotness: int) -> Script:
    """Uses sizes around the lanes that add a bag's weights, in their order; with an empty bag."""
    script = Script(num_tables=1, seed=hotness)
    keys, weights = script.mix_keys(hotness, range(9)), script.weights(hotness)
    bags = [make_ragged(keys, 0, combiner, [0, 0, hotness, hotness], weights) for combiner in (SUM, MEAN, SQRTN)]
    script.plan_uses(Batch(*bags), 3)
    return script


@case()
def uses_large() -> Script:
    """Uses more blocks than a block has threads, and more positions than any chunk of the CPU."""
    script = Script(num_tables=2)
    keys = (2.0 ** script.rng.uniform(0, 24, 100_000)).astype(np.uint64)
    batch = Batch(make_fixed(keys[:70_000], 0, SUM, 1), make_fixed(keys[70_000:], 1, MEAN, 10))
    script.plan_uses(batch, 8, on={1: 3})
    return script


@cases(*KINDS)
def uses_kinds(kind: str) -> Script:
    """Uses keys that a careless plan confuses."""
    script = Script(slabs=(5, 7, 2500), num_tables=3)
    _, keys = KINDS[kind](script, 300)
    script.plan_uses(batch_of_bags(script, as_keys(keys)), 8)
    return script


@case()
def uses_one_key() -> Script:
    """Uses one key 5,000 times, with a use for each; each table has another owner for it, or the same."""
    script = Script(num_tables=3)
    script.plan_uses(batch_of_bags(script, np.full(5000, 2**63, np.uint64)), 64)
    return script


@case()
def uses_placed() -> Script:
    """Covers all keys on one shard, tables pinned to a shard, and owners in any order and beyond the last."""
    script = Script(num_tables=3)
    batch = batch_of_bags(script, script.mix_keys(300, range(200)))
    for owner in (0, 7):
        script.plan_uses(batch, 8, owners=owner)
    script.plan_uses(batch, 8, on={0: 5, 1: 5, 2: 5})
    script.plan_uses(batch, 3, on={1: 0})
    script.plan_uses(batch, 8, owners=script.rng.integers(0, 8, NUM_PARTITIONS), on={0: 7, 2: 0})
    script.plan_uses(batch, 3, owners=script.rng.integers(0, 2**32, NUM_PARTITIONS), on={1: 2**32 - 2})
    script.plan_uses(batch, 1, owners=7, on={1: 3})
    return script


@case()
def uses_divisors() -> Script:
    """Uses divisors of zero: no keys, only padding, weights that are zero or cancel; for mean alone, or sqrtn too.

    Uses of these bags are marked, and the others are divided by the remaining weights, negative sums included.
    """
    script = Script(num_tables=2)
    bags = [
        ([], []),
        ([PADDING_KEY, PADDING_KEY], [1, 2]),
        ([5, 6, 7], [0, -0.0, 0]),
        ([5, 6], [1.5, -1.5]),
        ([5, PADDING_KEY, 6], [1.5, -1.5, 0]),
        ([5, 6], [-1.5, 0.25]),
        ([8, 9], [1e-30, 1e-30]),  # a sum of squares that is zero in float32
        ([5, 6, 7], [np.inf, 2, 1]),
        ([9, 9], [3e38, 3e38]),
        ([], []),
    ]
    keys = as_keys([key for of_bag, _ in bags for key in of_bag])
    weights = np.array([weight for _, of_bag in bags for weight in of_bag], F32)
    offsets = np.cumsum([0, *(len(of_bag) for of_bag, _ in bags)])
    features = [make_ragged(keys, c % 2, c, offsets, w) for c in (SUM, MEAN, SQRTN) for w in (weights, None)]
    script.plan_uses(Batch(*features), 3)
    return script


@case()
def uses_padding() -> Script:
    """Padding, and keys in no bag, make no use; bags without any key are at both ends."""
    script = Script(num_tables=3)
    batch = Batch(
        make_fixed(np.full(300, PADDING_KEY, np.uint64), 0, MEAN, 3),
        make_ragged(range(64), 1, SUM, [64]),
        make_ragged(range(64), 2, MEAN, [9, 9, 9]),
        make_ragged(range(64), 2, SUM, [0, 0, 0, 64, 64, 64], script.weights(64)),
    )
    for num_shards in (1, 3):
        script.plan_uses(batch, num_shards)
    script.plan_uses(batch_with_loose_ends(lambda num, *_: script.rng.integers(0, 40, num)), 8)
    return script


@case()
def uses_70_tables() -> Script:
    """Uses 70 tables with keys of the same numbers, some on one shard."""
    script = Script(num_tables=70)
    keys, combiners = script.rng.integers(0, 12, (70, 30)), (SUM, MEAN, SQRTN)
    batch = Batch(*(make_fixed(keys[t], t, combiners[t % 3], 1 + t % 3) for t in range(70)))
    script.plan_uses(batch, 8, on={t: t % 8 for t in range(0, 70, 3)})
    return script


@cases(0, 300)
def small_uses(num_keys: int) -> Script:
    """Uses several shards, and one; a table is on one of them."""
    script = Script(num_tables=3)
    batch = batch_of_bags(script, script.mix_keys(num_keys, range(50)))
    for num_shards in (1, 3):
        script.plan_uses(batch, num_shards, on={2: 0})
    return script


@cases(0, 300)
def small_requests(num_keys: int) -> Script:
    """Uses several shards, and one; a table is on one of them."""
    script = Script(num_tables=3)
    batch = batch_of_tables(script, script.mix_keys(num_keys, range(50)))
    for num_shards in (1, 3):
        script.plan_requests(batch, num_shards, on={2: 0})
    return script
