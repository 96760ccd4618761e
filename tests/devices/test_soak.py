"""A long run on eight devices, with every change between steps, against the dict oracle.

JAXSOK_SLOW=1 enables it, JAXSOK_SOAK_S sets its seconds (60; a release: 1800), JAXSOK_SOAK_SEED its random seed.
"""

import dataclasses
import os
import time

import jax
import numpy as np
import oracle
import programs
import pytest

import jaxsok

NUM_SHARDS = 8
SECONDS = float(os.environ.get("JAXSOK_SOAK_S", "60"))
SEED = int(os.environ.get("JAXSOK_SOAK_SEED", "0"))
EPISODE_S = 240  # then other placements start; most of the first minute compiles
SIZES = (16, 64)  # samples of a batch: each size is a program
MAX_HOTNESS, NUM_ERASED, SEGMENT_STEPS = 3, 6, 16
NUM_KEYS = 1200  # per table, at most
# Thousands of float32 steps against float64 ones: each rounds a row to a relative 2^-24.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table and its feature, which has the same name."""

    name: str
    dim: int
    optimizer: object
    oracle: object
    rate: float
    row_gradient: str
    combiner: str | None
    is_ragged: bool


TABLES = (
    Table("user", 4, jaxsok.optim.adam(0.01), oracle.Adam(), 0.01, "sum", "sum", False),
    Table("history", 4, jaxsok.optim.adam(0.01), oracle.Adam(), 0.01, "sum", "mean", True),
    Table("basket", 3, jaxsok.optim.adagrad(0.05), oracle.Adagrad(), 0.05, "mean", "sqrtn", True),
    Table("ad", 3, jaxsok.optim.sgd(0.01), oracle.Sgd(), 0.01, "sum", "sum", False),
)


class Episode:
    """A collection with placements of its own, its state, its oracle, and the results still to be compared."""

    def __init__(self, rng):
        self.rng = rng
        self.placements = [self.some_placement() for _ in TABLES]
        specs = [
            jaxsok.TableSpec(
                table.name,
                table.dim,
                table.optimizer,
                row_gradient=table.row_gradient,
                capacity=256,
                placement=placement,
            )
            for table, placement in zip(TABLES, self.placements, strict=True)
        ]
        features = [
            jaxsok.FeatureSpec(
                table.name,
                table.name,
                combiner=table.combiner,
                max_keys=MAX_HOTNESS * SIZES[-1] if table.is_ragged else None,
            )
            for table in TABLES
        ]
        exchange = jaxsok.ExchangeSpec(send_capacity=int(rng.choice([4, 16]))) if rng.random() < 0.5 else None
        self.collection = jaxsok.Collection(
            specs, features, mesh=programs.mesh(NUM_SHARDS), axis="data", exchange=exchange
        )
        step = programs.fed_step(self.collection)
        self.step = self.collection.ahead(step) if rng.random() < 0.3 else step
        self.seed = int(rng.integers(0, 3))
        self.state = self.collection.init(seed=self.seed)
        # Each table has some keys of any owner, and some of one shard.
        self.keys = {}
        for table in TABLES:
            aimed = programs.keys_of_owner(int(rng.integers(NUM_SHARDS)), NUM_KEYS // 4, table.name, NUM_SHARDS)
            rest = rng.integers(0, 2**63, NUM_KEYS - len(aimed)).astype(np.uint64)
            self.keys[table.name] = (np.concatenate([aimed, rest]), len(aimed))
        self.oracle = self.make_oracle()
        self.waiting = []
        self.num_steps = self.num_rounds = self.num_erased = 0

    def some_placement(self):
        """Draws one of ten placements."""
        kind = self.rng.integers(3)
        return (jaxsok.SHARDED, jaxsok.REPLICATED, jaxsok.on(int(self.rng.integers(NUM_SHARDS))))[kind]

    def make_oracle(self):
        """Returns an oracle with a store for each table: pooling is invisible as long as nothing is refused."""
        stores, features = [], []
        for table in TABLES:
            keys, _ = self.keys[table.name]
            initial = programs.initial_rows(table.name, table.dim, keys, seed=self.seed)
            rows = dict(zip(keys.tolist(), initial, strict=True))
            tables = {table.name: oracle.TableOracle(table.name, rows.__getitem__)}
            stores.append(
                oracle.StoreOracle(table.dim, table.oracle, table.rate, 10**9, tables, row_gradient=table.row_gradient)
            )
            features.append(oracle.Feature(table.name, table.name, table.combiner, 0))
        return oracle.CollectionOracle(stores, features)

    def some_keys(self, table, num_keys, kind):
        """Draws keys of one table: spread, few, a single one, or all of one owner."""
        keys, num_aimed = self.keys[table]
        reach = min(len(keys), 50 + 8 * self.num_steps)  # the longer it runs, the more keys occur
        if kind == "one key":
            return np.full(num_keys, keys[self.rng.integers(len(keys))])
        if kind == "one owner":
            return self.rng.choice(keys[:num_aimed], num_keys)
        if kind == "few":
            return keys[np.minimum(self.rng.zipf(1.3, num_keys) - 1, len(keys) - 1)]
        return self.rng.choice(self.rng.permutation(keys)[:reach], num_keys)

    def some_batch(self, is_pipelined):
        """Returns a raw batch, and the oracle's form of it."""
        size = int(self.rng.choice(SIZES))
        # Without a plan, growth cannot foresee keys that all belong to one shard, and may refuse some.
        kinds = ["spread", "few", "one key", "empty devices", *(["one owner"] if is_pipelined else [])]
        raw, plain = {}, {}
        for table in TABLES:
            kind = str(self.rng.choice(kinds))
            if table.is_ragged:
                lengths = self.rng.integers(0, MAX_HOTNESS + 1, size)
                if kind == "empty devices":
                    lengths[: size // 2] = 0
                flat = self.some_keys(table.name, int(lengths.sum()), kind)
                raw[table.name] = jaxsok.Bags(flat, lengths=lengths)
                bags = [part.tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]
            else:
                flat = self.some_keys(table.name, size, kind)
                if kind == "empty devices":
                    flat[size // 2 :] = jaxsok.PADDING_KEY
                raw[table.name], bags = flat, [[key] for key in flat.tolist()]
            plain[table.name] = bags
        gradients = {
            table.name: self.rng.choice([0.25, 0.5, 1.0, 2.0], (size, table.dim)).astype(np.float32) for table in TABLES
        }
        return raw, plain, gradients

    def run_segment(self):
        """Runs some steps of one path, then compares everything."""
        is_pipelined = bool(self.rng.random() < 0.5)
        batches = [self.some_batch(is_pipelined) for _ in range(SEGMENT_STEPS)]
        if is_pipelined:
            asked = (plan for _, plan in self.collection.pipeline(raw for raw, _, _ in batches))
        else:
            asked = (self.collection.batch(raw).features for raw, _, _ in batches)
        for request, (_, plain, gradients) in zip(asked, batches, strict=True):
            self.state = self.collection.grow(self.state)
            self.state, embeddings, stats = self.step(self.state, request, gradients)
            want, plan = self.oracle.lookup(plain)
            self.oracle.update([plan], [gradients])
            self.waiting.append((embeddings, stats, want, plan.counts))
            self.num_steps += 1
            if self.rng.random() < 0.1:
                self.erase()
        self.compare()

    def erase(self):
        """Erases rows, perhaps some that are absent."""
        table = str(self.rng.choice([table.name for table in TABLES]))
        victims = self.rng.choice(self.keys[table][0], NUM_ERASED, replace=False)
        self.state, num_erased = self.collection.erase(self.state, table, victims)
        wanted = self.oracle.erase(table, victims.tolist())
        assert int(num_erased) == wanted, self.describe(table)
        self.num_erased += wanted

    def describe(self, what):
        """Returns the message that makes a failure reproducible."""
        return f"{what}: seed {SEED}, step {self.num_steps}, placements {self.placements}, {self.collection.exchange}"

    def compare(self):
        """Compares embeddings and counts of every step since the last comparison, and all tables."""
        for embeddings, stats, want, counts in jax.device_get(self.waiting):
            stats.check()
            self.num_rounds = max(self.num_rounds, int(stats.num_rounds.max()))
            for name in want:
                np.testing.assert_allclose(embeddings[name], want[name], err_msg=self.describe(name), **TOLERANCE)
                got = stats.to_dict()[name]
                for count in ("num_found", "num_inserted", "num_missing", "num_refused"):
                    assert got[count] == counts[name][count], self.describe(f"{name}: {count}")
        self.waiting.clear()
        for table in TABLES:
            got = programs.by_key(self.collection, self.state, table.name)
            want = sorted(self.oracle.export_table(table.name), key=lambda row: row[1])
            assert got["keys"].tolist() == [key for _, key, _, _ in want], self.describe(table.name)
            if not want:
                continue
            columns = [column for name, column in got.items() if name not in ("keys", "rows")]
            wanted = [np.stack([state[i] for _, _, _, state in want]) for i in range(len(columns))]
            pairs = [(got["rows"], np.stack([row for _, _, row, _ in want])), *zip(columns, wanted, strict=True)]
            for values, others in pairs:
                np.testing.assert_allclose(values, others, err_msg=self.describe(table.name), **TOLERANCE)


@pytest.mark.slow
def test_soak():
    """For the given time, every number agrees with the dict oracle."""
    rng, end = np.random.default_rng(SEED), time.monotonic() + SECONDS
    totals = dict.fromkeys(("steps", "grown", "erased", "rounds"), 0)
    while time.monotonic() < end:
        jax.clear_caches()  # programs of earlier episodes hold memory maps, and Linux allows 65,530
        episode, end_of_episode = Episode(rng), min(end, time.monotonic() + EPISODE_S)
        while time.monotonic() < end_of_episode:
            episode.run_segment()
        totals["steps"] += episode.num_steps
        totals["grown"] += episode.collection.growth.num_grown
        totals["erased"] += episode.num_erased
        totals["rounds"] = max(totals["rounds"], episode.num_rounds)
    print(f"soak: {totals}")
    assert totals["steps"] >= SEGMENT_STEPS and totals["grown"] >= 1
