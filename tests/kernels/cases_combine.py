"""Cases of combine_transpose. See kernel_scripts.py."""

import numpy as np
from kernel_model import BF16, F32, MEAN, SQRTN, SUM, Batch, Feature, make_fixed, make_ragged, single
from kernel_scripts import DIMS, SIZES, Script, case, cases


def transpose_feature(script: Script, feature: Feature, inverse: np.ndarray, num_unique: int) -> None:
    """Runs combine_transpose of one feature, to float32 and to bfloat16."""
    for dtype in (F32, BF16):
        script.transpose(Batch(feature), inverse, num_unique, dtype=dtype)


@cases(*DIMS)
def transpose_feature_dims(dim: int) -> Script:
    """Uses one feature, with a row of more than 1,024 uses."""
    number = DIMS.index(dim)
    script = Script(dim=dim, seed=dim)
    inverse = np.where(script.rng.random(1400) < 0.8, 3, script.rng.integers(-2, 23, 1400))
    offsets = np.r_[0, np.sort(script.rng.integers(0, 1400, 63)), 1400]
    weights = script.weights(1400) if number % 2 else None
    transpose_feature(script, make_ragged(np.zeros(1400), 0, 1 + number % 3, offsets, weights), inverse, 20)
    return script


@cases(*SIZES)
def transpose_feature_sizes(num_keys: int) -> Script:
    """Uses as many positions, bags or rows as threads, warps, blocks; indices out of range are padding."""
    number = SIZES.index(num_keys)
    script = Script(dim=(4, 3, 8)[number % 3], seed=num_keys)
    num_unique = max(1, num_keys // (1 + number % 3))
    inverse = script.rng.integers(-1, num_unique + 1, num_keys)
    inverse[::17] = np.resize([-(2**31), 2**31 - 1], len(inverse[::17]))
    num_bags = max(1, num_keys // (1 + (number + 1) % 3))
    offsets = np.r_[0, np.sort(script.rng.integers(0, num_keys + 1, num_bags - 1)), num_keys]
    weights = script.weights(num_keys) if number % 2 else None
    transpose_feature(script, make_ragged(np.zeros(num_keys), 0, 1 + number % 3, offsets, weights), inverse, num_unique)
    return script


@case()
def transpose_feature_fixed() -> Script:
    """Uses bags of one size, of 500 keys, weights of sum zero, no bags, no rows."""
    script = Script(dim=8)

    def inverse(num):
        return script.rng.integers(-1, 34, num)

    transpose_feature(script, make_fixed(np.zeros(1000), 0, MEAN, 500), inverse(1000), 33)
    transpose_feature(script, make_fixed(np.zeros(257), 0, SQRTN, 1, script.weights(257)), inverse(257), 33)
    zero = np.array([1, -1, 0, 0, 2, 1], F32)
    for combiner in (SUM, MEAN, SQRTN):
        transpose_feature(script, make_ragged(np.zeros(6), 0, combiner, [0, 2, 4, 6], zero), np.arange(6) % 4, 4)
    transpose_feature(script, make_ragged(np.zeros(6), 0, MEAN, [0]), np.arange(6) % 4, 4)
    transpose_feature(script, make_ragged(np.zeros(6), 0, MEAN, [0, 3, 6]), np.arange(6), 0)
    return script


@case()
def transpose_feature_odd_offsets() -> Script:
    """Uses positions in no bag, and offsets out of range."""
    script = Script(dim=8)
    transpose_feature(script, make_ragged(np.zeros(64), 0, MEAN, [5, 10, 10, 40]), script.rng.integers(-1, 11, 64), 10)
    transpose_feature(script, make_ragged(np.zeros(64), 0, SUM, [-9, 3, 70, 90]), script.rng.integers(-1, 11, 64), 10)
    return script


@cases(*SIZES)
def transpose_sizes(num_keys: int) -> Script:
    """Uses three features over one list of rows: single keys, weighted bags of two, ragged bags and loose positions."""
    number = SIZES.index(num_keys)
    script = Script(dim=(3, 8, 66)[number % 3], seed=num_keys)
    half, num_unique = num_keys // 2 * 2, max(1, num_keys // 2)
    first, last = num_keys // 7, num_keys - num_keys // 9
    offsets = np.r_[first, np.sort(script.rng.integers(first, last + 1, num_keys // 3)), last]
    batch = Batch(
        single(np.zeros(num_keys)),
        make_fixed(np.zeros(half), 1, 1 + number % 3, 2, script.weights(half)),
        make_ragged(np.zeros(num_keys), 2, 1 + (number + 1) % 3, offsets),
    )
    inverse = script.rng.integers(-1, num_unique + 1, len(batch.keys))
    inverse[::17] = np.resize([-(2**31), 2**31 - 1], len(inverse[::17]))
    script.transpose(batch, inverse, num_unique)
    return script


@cases(*DIMS)
def transpose_dims(dim: int) -> Script:
    """Uses a row with more than 1,024 uses, in all features; a row with none; numbers of uses."""
    script = Script(dim=dim, seed=dim)
    lengths = np.resize([0, 33, 1, 2, 64], 40)
    num_keys = int(lengths.sum())
    offsets = np.r_[0, np.cumsum(lengths)]
    batch = Batch(
        make_ragged(np.zeros(num_keys), 0, 1 + dim % 3, offsets, script.weights(num_keys)),
        single(np.zeros(600)),
        make_fixed(np.zeros(300), 0, SQRTN, 3),
    )
    inverse = np.where(script.rng.random(len(batch.keys)) < 0.8, 3, script.rng.integers(-2, 40, len(batch.keys)))
    script.transpose(batch, np.where(inverse == 5, -1, inverse), 38)
    return script


@case()
def transpose_one_row() -> Script:
    """Makes every position of every feature use the same row; then none uses any; then there is no row."""
    script = Script(dim=8)
    batch = Batch(single(np.zeros(700)), make_fixed(np.zeros(900), 0, MEAN, 3), single(np.zeros(33)))
    for inverse, num_unique in ((np.zeros(1633, int), 1), (np.full(1633, 9), 9), (np.full(1633, -1), 3)):
        script.transpose(batch, inverse, num_unique)
    script.transpose(batch, np.zeros(1633, int), 0)
    return script


@case()
def transpose_zero_divisors() -> Script:
    """Keys of a bag whose weights cancel or vanish are no uses of their rows, except with sum; padding is ignored."""
    script = Script(dim=8)
    weights = np.array([1, -1, 0, 0, 2, 1, 0.5, -0.5, 3, 0, 0, 1, -1, 1, -1, 4], F32)
    offsets = [0, 2, 4, 5, 8, 9, 11, 15, 15, 16]
    batch = Batch(*(make_ragged(np.zeros(16), 0, c, offsets, weights) for c in (SUM, MEAN, SQRTN)), single(np.zeros(5)))
    script.transpose(batch, np.arange(53) % 16, 16)
    script.transpose(batch, np.where(np.arange(53) % 3 == 1, -1, np.arange(53) % 7), 8)
    return script


@case()
def transpose_odd_offsets() -> Script:
    """Uses positions in no bag, offsets out of range, features without keys and without bags."""
    script = Script(dim=8)
    batch = Batch(
        single([]),
        make_ragged(np.zeros(64), 0, MEAN, [5, 10, 10, 40]),
        make_ragged([], 0, SUM, [0, 0, 0]),
        make_ragged(np.zeros(64), 0, SUM, [-9, 3, 70, 90]),
        make_ragged(np.zeros(64), 0, SQRTN, [64]),
        single(np.zeros(64)),
        make_ragged(np.zeros(300), 0, MEAN, np.r_[np.full(300, 7), 290]),
    )
    script.transpose(batch, script.rng.integers(-1, 11, len(batch.keys)), 10)
    return script


@case()
def transpose_not_finite() -> Script:
    """Returns infinite sums unchanged; the transpose does not skip them."""
    script = Script(dim=8)
    batch = Batch(single(np.zeros(40)), make_fixed(np.zeros(40), 0, SUM, 2))
    gradients = [script.normal(f.num_bags, 8) for f in batch.features]
    gradients[0][3, 2], gradients[1][5, 0] = np.inf, -np.inf
    gradients[0][7:9, 1] = 3e38
    script.transpose(batch, np.arange(80) // 4 % 13, 13, gradients)
    return script


@case()
def transpose_40_features() -> Script:
    """Combines every kind of feature, more features than a warp has lanes, and more than one tile of bags."""
    script = Script(dim=12)
    features = []
    for i in range(40):
        combiner, n = 1 + i // 4 % 3, int(script.rng.integers(0, 400))
        weights = script.weights(n) if i % 5 == 0 else None
        if i % 4 == 0:
            features.append(single(np.zeros(n)))
        elif i % 4 == 1:
            h = 1 + i // 4 % 5
            n = n // h * h
            features.append(make_fixed(np.zeros(n), 0, combiner, h, None if weights is None else weights[:n]))
        else:
            features.append(
                make_ragged(
                    np.zeros(n), 0, combiner, np.r_[0, np.sort(script.rng.integers(0, n + 1, 9 * i)), n], weights
                )
            )
    batch = Batch(*features)
    script.transpose(batch, script.rng.integers(-3, 900, len(batch.keys)), 890)
    return script


@cases(4, 33)
def small_transpose_feature(dim: int) -> Script:
    """Uses one feature, with a row of 1,100 uses."""
    script = Script(dim=dim)
    inverse = np.where(script.rng.random(1200) < 0.95, 3, script.rng.integers(-2, 9, 1200))
    transpose_feature(
        script, make_ragged(np.zeros(1200), 0, MEAN, np.arange(0, 1201, 40), script.weights(1200)), inverse, 8
    )
    return script


@cases(4, 33)
def small_transpose(dim: int) -> Script:
    """Uses three features, with a row of 1,100 uses."""
    script = Script(dim=dim)
    batch = Batch(
        single(np.zeros(600)),
        make_ragged(np.zeros(600), 0, MEAN, np.arange(40, 561, 40), script.weights(600)),
        make_fixed(np.zeros(60), 0, SUM, 3),
    )
    inverse = np.where(script.rng.random(1260) < 0.95, 3, script.rng.integers(-2, 9, 1260))
    script.transpose(batch, inverse, 8)
    return script
