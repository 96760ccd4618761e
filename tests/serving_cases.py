"""Helpers of the serving tests: tables as dicts, folders of them, configurations, and a trained state."""

import functools

import jax
import numpy as np

import jaxsok
from jaxsok import checkpoint
from jaxsok.interchange import hps

PADDING = 2**64 - 1

PLATFORMS = ["cpu"] if jax.default_backend() == "cpu" else ["cpu", "cuda"]
"""Platforms of exported models: where rows lie on the host, so does the model."""


def records_of(content, dim):
    """Returns the records of a dict from keys to rows."""
    keys = np.array(list(content), np.uint64)
    return jaxsok.Records(keys, np.array(list(content.values()), np.float32).reshape(len(keys), dim))


def rows_of(keys, dim, version=0, rng=None):
    """Returns a table of rows that encode their key and their version."""
    del rng
    return {key: np.float32([1000 * version + (key * 7 + column) % 997 for column in range(dim)]) for key in keys}


def write(folder, content):
    """Writes an HPS directory."""
    dim = len(next(iter(content.values())))
    hps.write_hps(folder, records_of(content, dim), overwrite=True)
    return str(folder)


def model_of(tables, name="dlrm", defaults=None, per_sample=8, **more):
    """Returns a model of a configuration: tables from names to (folder, dim)."""
    model = {
        "model": name,
        "sparse_files": [str(folder) for folder, _ in tables.values()],
        "embedding_table_names": list(tables),
        "embedding_vecsize_per_table": [dim for _, dim in tables.values()],
        "maxnum_catfeature_query_per_table_per_sample": [per_sample] * len(tables),
        "default_value_for_each_table": [(defaults or {}).get(table, 0.0) for table in tables],
        "deployed_device_list": [0],
        "gpucacheper": 1.0,
        **more,
    }
    return model


def config_of(*models, **more):
    """Returns a configuration of models."""
    return {"supportlonglong": True, "models": list(models), **more}


def expect(content, keys, default, dim):
    """Returns what a lookup must give, from NumPy and dicts alone."""
    keys = np.asarray(keys)
    lines = []
    for key in keys.reshape(-1).tolist():
        key %= 2**64
        lines.append(np.zeros(dim) if key == PADDING else content.get(key, np.full(dim, default)))
    return np.array(lines, np.float32).reshape(*keys.shape, dim)


@functools.cache
def _collection(dims):
    """Returns one collection for all tests, so that its programs are compiled once."""
    tables = [
        jaxsok.TableSpec(name, dim=dim, optimizer=jaxsok.optim.sgd(0.1), capacity=64, statistics=True)
        for name, dim in dims
    ]
    return jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, table=name) for name, _ in dims])


class Trained:
    """A training state with tables that are set and erased, the expected dicts, and exports."""

    def __init__(self, dims):
        self.dims = dims
        self.collection = _collection(tuple(dims.items()))
        self.state = self.collection.init(seed=0)
        self.content = {name: {} for name in dims}
        self.clock = 1

    def set(self, table, content):
        """Sets rows."""
        if not content:
            return
        records = records_of(content, self.dims[table])
        self.state, _, refused = self.collection.assign(
            self.state, table, records.keys, records.rows, clock=np.uint32(self.clock)
        )
        assert int(refused) == 0
        self.content[table] = {**self.content[table], **content}

    def erase(self, table, keys):
        """Removes keys."""
        keys = [key for key in keys if key in self.content[table]]
        if keys:
            self.state, _ = self.collection.erase(self.state, table, np.array(keys, np.uint64))
        self.content[table] = {key: row for key, row in self.content[table].items() if key not in keys}

    def full(self, path):
        """Exports everything; later changes have a later time."""
        self.clock += 1
        checkpoint.export_full(path, self.collection, self.state, clock=self.clock)
        return str(path)

    def delta(self, path, base):
        """Exports the changes since another export."""
        self.clock += 1
        checkpoint.export_delta(path, self.collection, self.state, base, clock=self.clock)
        return str(path)

    def frozen_content(self):
        """Returns a copy of the present dicts."""
        return {name: dict(content) for name, content in self.content.items()}


# Keys without a row --------------------------------------------------------------------------------------------------

INITIALIZERS = {
    "ones": jaxsok.initializers.ones(),
    "zeros": jaxsok.initializers.zeros(),
    "constant": jaxsok.initializers.constant(0.3),
    "uniform": jaxsok.initializers.uniform(-1.0, 2.0),
    "normal": jaxsok.initializers.normal(0.5, 0.25),
    "truncated": jaxsok.initializers.truncated_normal(0.5, -0.25),
    "fan_uniform": jaxsok.initializers.fan_in(1.0, "uniform"),
    "fan_normal": jaxsok.initializers.fan_in(2.0, "normal"),
    "fan_truncated": jaxsok.initializers.fan_in(0.5, "truncated_normal"),
}
"""Every one that served tables can carry: a table of each, by name."""


def _sum(words, columns):
    return words[0].astype(np.float32) + columns.astype(np.float32)


TRACED = {
    "matrix": jaxsok.initializers.matrix(np.array([[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 0.0, 8.0]])),
    "function": jaxsok.initializers.function(_sum, "sum"),
}
"""Those that XLA works out."""

UNKNOWN_DIM = 4
KNOWN = np.array([3, 2**40 + 1, 2**64 - 2], np.uint64)
"""Keys with rows, in all tables of `declare_untrained`."""
ASKED = np.array([3, 5, 2**63 + 5, PADDING, 2**40 + 1, 5, 0, 2**64 - 2], np.uint64)
"""Some with rows, some without."""


@functools.cache
def declare_untrained(dtype="float32", seed=2**40 + 7):
    """Returns a collection of a table per initializer, read as "initial", and some read as "zeros"; and its state."""
    several = functools.partial(
        jaxsok.TableSpec, dim=UNKNOWN_DIM, optimizer=jaxsok.optim.sgd(0.1), dtype=dtype, capacity=8, statistics=True
    )
    specs = [several(name, initializer=initializer) for name, initializer in INITIALIZERS.items()]
    specs += [
        several(f"{name}_zeros", initializer=(INITIALIZERS | TRACED)[name], unknown="zeros")
        for name in ("normal", "constant", "matrix", "function")
    ]
    features = [jaxsok.FeatureSpec(spec.name, table=spec.name, combiner=None) for spec in specs]
    collection = jaxsok.Collection(specs, features)
    batch = collection.batch({spec.name: KNOWN for spec in specs})
    _, state, _ = collection.lookup(collection.init(seed=seed), batch.features)
    return collection, state


def find_in_training(collection, state, keys=ASKED):
    """Returns the results of `find` for keys, by table, in float32."""
    shape = np.asarray(keys).shape
    batch = collection.batch({table.name: np.asarray(keys).reshape(-1) for table in collection.tables})
    embeddings, stats = collection.find(state, batch.features)
    stats.check()
    return {name: np.asarray(value, np.float32).reshape(*shape, UNKNOWN_DIM) for name, value in embeddings.items()}
