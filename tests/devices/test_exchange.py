"""The exchange: rows keep their values, reach their owners, and are counted if they have no room."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
import strategies
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

import jaxsok
from jaxsok import exchange
from jaxsok.shards import MeshShards
from jaxsok.strategy import Exchanged

NUM_SHARDS, CAPACITY, DIM = 4, 3, 6
SGD = jaxsok.optim.sgd(1.0)
# Half a unit in the last place of 24, 8, 11 and 4 bits, relative to the number
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4}
LEAST_NORMAL = 2.0**-126

# --------------------------------------------------------------------------------------------------------------
# The wire


@functools.cache
def travel(way, dtype, is_replicated=False):
    """Returns a jitted function that sends rows `[NUM_SHARDS * num_lines, DIM]` of all shards to owners or back."""
    mesh = programs.mesh(NUM_SHARDS)
    route = exchange.Route(MeshShards(mesh, ("data",)), is_replicated, CAPACITY)
    function = functools.partial(exchange.send_rows, dtype=dtype, send=getattr(route, way))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data")))


def send(rows, dtype):
    """Returns rows `[n, DIM]` after the wire; n is at most what all shards send in a round."""
    whole = np.zeros((NUM_SHARDS * NUM_SHARDS * CAPACITY, DIM), np.float32)
    whole[: len(rows)] = rows
    arrived = np.asarray(travel("to_owners", dtype)(whole))
    # A row from shard i to owner j is at [i, j] before and at [j, i] afterwards.
    swapped = arrived.reshape(NUM_SHARDS, NUM_SHARDS, CAPACITY, DIM).swapaxes(0, 1)
    return swapped.reshape(-1, DIM)[: len(rows)]


def rows_of_all_sizes():
    """Draws rows of both signs whose largest number is from 2^-110 to 2^126, with columns down to a millionth of it."""
    rng = np.random.default_rng(0)
    exponents = np.linspace(-110, 126, NUM_SHARDS * NUM_SHARDS * CAPACITY - 2)
    within = 2.0 ** rng.uniform(-20, 0, (len(exponents), DIM)) * rng.choice([-1, 1], (len(exponents), DIM))
    return (2.0 ** exponents[:, None] * within).astype(np.float32)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rounding_of_the_wire(dtype):
    """The error is at most one rounding, relative to the largest number of the row, whatever its size."""
    rows = rows_of_all_sizes()
    error = np.abs(send(rows, dtype).astype(np.float64) - rows)
    assert (error <= ROUNDING[dtype] * np.abs(rows).max(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_numbers_near_the_largest_keep_their_own_rounding(dtype):
    """Within three octaves of the largest number of its row, a number's error is relative to the number itself."""
    rng = np.random.default_rng(1)
    rows = rng.choice([-1, 1], (40, DIM)) * rng.uniform(0.125, 1.0, (40, DIM)) * 2.0 ** rng.integers(-100, 100, (40, 1))
    rows = rows.astype(np.float32)
    np.testing.assert_array_less(np.abs(send(rows, dtype) - rows), ROUNDING[dtype] * np.abs(rows) + 1e-45)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_powers_of_two_travel_unharmed(dtype):
    """Scales are powers of two, so numbers without a mantissa lose nothing, zeros included."""
    rows = (2.0 ** np.arange(-60, 60, 3)).astype(np.float32)[:, None] * np.array([1, -1, 0, 0.5, 0.25, 1], np.float32)
    np.testing.assert_array_equal(send(rows, dtype), rows)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_zeros_stay_zeros(dtype):
    """A row of zeros has no largest number to scale by, and stays zero."""
    assert (send(np.zeros((5, DIM), np.float32), dtype) == 0).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_rows_that_are_not_finite_stay_so(dtype, value):
    """The owner sees that a gradient was infinite or NaN; other rows are unaffected."""
    rows = np.tile(np.array([1, 2, 4, 0.5, 0.25, -1], np.float32), (7, 1))
    rows[3, 2] = value
    arrived = send(rows, dtype)
    assert not np.isfinite(arrived[3, 2])
    others = np.arange(7) != 3
    np.testing.assert_array_equal(arrived[others], rows[others])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_tiny_rows(dtype):
    """Numbers below the least normal one may be flushed to zero, as XLA does elsewhere; no error is larger."""
    rows = np.array(
        [[1e-40, 0, -1e-45, 2e-39, 0, 1e-42], [LEAST_NORMAL, -LEAST_NORMAL, 0, 1e-40, 0, 2e-38]], np.float32
    )
    error = np.abs(send(rows, dtype).astype(np.float64) - rows)
    assert (error <= LEAST_NORMAL + ROUNDING[dtype] * np.abs(rows)).all()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_huge_rows_stay_finite(dtype):
    """Scales cover the range of float32, and what would be rounded up to infinity gets the greatest number."""
    most = np.finfo(np.float32).max
    rows = np.array([[3e38, -3e38, 1.0, 0, 1e38, 2e38], [most, -most, 3.35e38, 3.39e38, 2e38, 0]], np.float32)
    arrived = send(rows, dtype).astype(np.float64)
    assert np.isfinite(arrived).all()
    assert (np.abs(arrived - rows) <= ROUNDING[dtype] * np.abs(rows).max(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("is_replicated", [False, True])
def test_lines_return_to_where_they_came_from(is_replicated):
    """The way back reverses the way to owners; every owner of a replicated store receives everything."""
    num_sent = CAPACITY if is_replicated else NUM_SHARDS * CAPACITY
    rows = np.arange(NUM_SHARDS * num_sent * DIM, dtype=np.float32).reshape(-1, DIM)
    there = travel("to_owners", "float32", is_replicated)(rows)
    if is_replicated:
        np.testing.assert_array_equal(there, np.tile(rows, (NUM_SHARDS, 1)))
    np.testing.assert_array_equal(travel("to_askers", "float32", is_replicated)(there), rows)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_bytes_on_the_wire(dtype):
    """`wire_bytes` is the number of bytes that the collective sends for a row."""
    rows = jax.ShapeDtypeStruct((NUM_SHARDS * NUM_SHARDS * CAPACITY, DIM), np.float32)
    text = travel("to_owners", dtype).lower(rows).as_text()
    (line,) = [line for line in text.splitlines() if "all_to_all" in line]
    *shape, kind = line.split(": (tensor<")[1].split(">")[0].split("x")
    itemsize = {"f32": 4, "ui16": 2, "ui8": 1}[kind]
    assert np.prod([int(size) for size in shape]) * itemsize == NUM_SHARDS * CAPACITY * exchange.wire_bytes(DIM, dtype)


# --------------------------------------------------------------------------------------------------------------
# Requests of a plan

NUM_SAMPLES, MAX_KEYS = 16, 24  # per shard: 4 samples; 8 positions of "user", 6 of "item"
TABLES = [
    jaxsok.TableSpec("user", 4, SGD, capacity=256),
    jaxsok.TableSpec("item", 4, SGD, capacity=256, placement=jaxsok.on(2)),
    jaxsok.TableSpec("ad", 4, SGD, capacity=256, placement=jaxsok.REPLICATED),
]
FEATURES = [
    jaxsok.FeatureSpec("user", "user"),
    jaxsok.FeatureSpec("item", "item", max_keys=MAX_KEYS),
    jaxsok.FeatureSpec("ad", "ad"),
]
# The capacity suffices for one store and not for some batches of the other; next, the positions of a shard in each.
SEND_CAPACITIES, POSITIONS = (5, 4), (14, 4)


@functools.cache
def collection():
    """Returns two stores on four shards: a sharded table and one on shard 2, and a replicated table."""
    return programs.over(NUM_SHARDS, TABLES, FEATURES)


@functools.cache
def jit_plan(one_round):
    """Returns a jitted plan, with the send capacities or without."""
    sizes = SEND_CAPACITIES if one_round else None
    return jax.jit(lambda features: collection().plan(features, send_capacity=sizes))


@st.composite
def batches(draw):
    """Draws raw batches of one shape; every shard has at most its share of ragged keys."""
    user = draw(strategies.padded_bags(strategies.CORNER_KEYS, NUM_SAMPLES, 2))
    parts = [draw(strategies.ragged_bags(strategies.CORNER_KEYS, 4, MAX_KEYS // NUM_SHARDS)) for _ in range(NUM_SHARDS)]
    ad = draw(strategies.key_lists(strategies.CORNER_KEYS, NUM_SAMPLES, padding=True))
    return {
        "user": programs.as_array(user),
        "item": programs.to_bags([bag for part in parts for bag in part]),
        "ad": programs.as_array(ad),
    }


def positions_of(raw, shard, store):
    """Returns the (table number, table, key) of each position of a shard's part of a store; None for padding."""
    first, last = 4 * shard, 4 * shard + 4
    if store == 1:
        found = [(0, "ad", int(key)) for key in raw["ad"][first:last]]
    else:
        offsets = np.concatenate([[0], np.cumsum(raw["item"].lengths)])
        found = [(0, "user", int(key)) for key in raw["user"][first:last].reshape(-1)]
        found += [(1, "item", int(key)) for key in raw["item"].keys[offsets[first] : offsets[last]]]
    found += [(0, "", oracle.PADDING_KEY)] * (POSITIONS[store] - len(found))
    return [None if sent[2] == oracle.PADDING_KEY else sent for sent in found]


def owner_of(pair):
    """Returns the owner of a (table number, table, key), derived independently."""
    _, table, key = pair
    return {"user": lambda: int(programs.owner_of([key], "user", NUM_SHARDS)[0]), "item": lambda: 2, "ad": lambda: 0}[
        table
    ]()


def by_owner(raw, shard, store, by_hash):
    """Returns a shard's distinct pairs by owner, in order of first occurrence or of hash, and their numbers of uses."""
    positions = [position for position in positions_of(raw, shard, store) if position is not None]
    distinct = list(dict.fromkeys(positions))
    num_owners = 1 if store == 1 else NUM_SHARDS
    segments = [[position for position in distinct if owner_of(position) == owner] for owner in range(num_owners)]
    if by_hash:
        segments = [
            sorted(part, key=lambda position: int(programs.round_hash([position[2]], position[1])[0]))
            for part in segments
        ]
    return segments, {position: positions.count(position) for position in distinct}


def words_of(pair, num_uses):
    """Returns the four words of a request."""
    number, _, key = pair
    return [key & 0xFFFFFFFF, key >> 32, number, num_uses]


def parts_of(array):
    """Splits an array by shard."""
    return np.split(np.asarray(array), NUM_SHARDS)


@given(raw=batches())
def test_requests(raw):
    """Each distinct key is sent once, by owner and first occurrence, with its uses; each position knows its request."""
    asked = jit_plan(False)(collection().batch(raw).features).asked
    for store, request in enumerate(asked):
        request = request.listed
        for shard, (lines, inverse, starts) in enumerate(
            zip(parts_of(request.lines), parts_of(request.inverse), parts_of(request.starts), strict=True)
        ):
            segments, uses = by_owner(raw, shard, store, by_hash=False)
            flat = [pair for segment in segments for pair in segment]
            assert starts.tolist() == np.cumsum([0, *map(len, segments)]).tolist()
            assert lines[: len(flat)].tolist() == [words_of(pair, uses[pair]) for pair in flat]
            assert (lines[len(flat) :, :2] == 0xFFFFFFFF).all()
            num_keys = POSITIONS[store]
            wanted = [num_keys if pair is None else flat.index(pair) for pair in positions_of(raw, shard, store)]
            assert inverse.tolist() == wanted


@pytest.mark.parametrize("is_listed", [False, True])
@given(raw=batches())
def test_load_slots_and_what_owners_receive(raw, is_listed):
    """The plan's counts show whether the capacity suffices; requests that fit are sent and return to their slots."""
    asked = jit_plan(not is_listed)(collection().batch(raw).features).asked
    for store, request in enumerate(asked):
        capacity = request.send_capacity
        assert (request.listed is not None) == is_listed
        assert is_listed or capacity == SEND_CAPACITIES[store]
        segments = [by_owner(raw, shard, store, by_hash=False) for shard in range(NUM_SHARDS)]
        counts = np.array([[len(part) for part in parts] for parts, _ in segments])
        for load in parts_of(request.load):
            assert load.tolist() == [[counts.max(), counts.sum(axis=0).max()]]
        for shard, slots in enumerate(parts_of(request.slots)):
            places = {
                pair: owner * capacity + i
                for owner, part in enumerate(segments[shard][0])
                for i, pair in enumerate(part[:capacity])
            }
            assert slots.tolist() == [places.get(pair, -1) for pair in positions_of(raw, shard, store)]
        for owner, received in enumerate(parts_of(request.received)):
            for parts, block in zip(segments, received.reshape(NUM_SHARDS, capacity, 4), strict=True):
                wanted = parts[0][0 if store == 1 else owner][:capacity]
                assert block[: len(wanted)].tolist() == [words_of(pair, parts[1][pair]) for pair in wanted]
                assert (block[len(wanted) :, :2] == 0xFFFFFFFF).all()


@functools.cache
def ordered_by_hash():
    """Returns a jitted function: a shard's requests by store, in the order in which rounds take their gradients."""
    declared = collection()

    def order(features):
        ordered = [exchange.HashOrder.of(*pair, 1) for pair in zip(declared.stores, features.stores, strict=True)]
        return [(order.lines, order.inverse, order.starts, order.hashes) for order in ordered]

    split = declared.shards.spec
    return jax.jit(lambda features: declared.shards.run(order, (features,), (split,), split))


@given(raw=batches())
def test_the_order_of_hashes(raw):
    """Each distinct key occurs once, by owner; an owner's requests rise by the hash that deals gradients to rounds."""
    for store, arrays in enumerate(ordered_by_hash()(collection().batch(raw).features)):
        for shard, (lines, inverse, starts, hashes) in enumerate(zip(*map(parts_of, arrays), strict=True)):
            segments, uses = by_owner(raw, shard, store, by_hash=True)
            flat = [pair for segment in segments for pair in segment]
            assert starts.tolist() == np.cumsum([0, *map(len, segments)]).tolist()
            assert lines[: len(flat)].tolist() == [words_of(pair, uses[pair]) for pair in flat]
            places = [
                POSITIONS[store] if pair is None else flat.index(pair) for pair in positions_of(raw, shard, store)
            ]
            assert inverse.tolist() == places
            got = hashes[: len(flat)].astype(np.uint64)
            wanted = [int(programs.round_hash([key], table)[0]) for _, table, key in flat]
            assert (got[:, 1] << np.uint64(32) | got[:, 0]).tolist() == wanted


def test_a_send_capacity_that_is_too_small_is_counted():
    """Keys that were not sent read their initial rows, learn nothing, and are counted as refused."""
    declared = programs.over(NUM_SHARDS, TABLES[:1], [jaxsok.FeatureSpec("user", "user", combiner=None)])
    keys = programs.keys_of_owner(1, 32, "user", NUM_SHARDS)
    features = programs.batch(declared, user=keys)
    plan = declared.plan(features, send_capacity=(3,))
    assert np.asarray(plan.asked[0].load)[0].tolist() == [8, 32]
    embeddings, state, plan = declared.lookup(declared.init(seed=0), plan)
    state, stats = declared.update(state, plan, {"user": np.ones((32, 4), np.float32)})
    assert programs.counts(stats) == {**dict.fromkeys(oracle.COUNTS, 0), "num_inserted": 12, "num_refused": 20}
    with pytest.raises(jaxsok.TableFullError, match="20 keys refused"):
        stats.check()
    initial = programs.initial_rows("user", 4, keys)
    np.testing.assert_array_equal(embeddings["user"], initial)
    rows = programs.rows_of(declared, state, "user")
    assert sorted(rows) == sorted(keys.reshape(4, 8)[:, :3].reshape(-1).tolist())
    for key, row in zip(keys.tolist(), initial, strict=True):
        if key in rows:
            np.testing.assert_allclose(rows[key], row - 1.0, rtol=1e-6)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
@pytest.mark.parametrize("placement", [jaxsok.SHARDED, jaxsok.REPLICATED])
def test_keys_that_were_not_sent_are_part_of_the_hotness(combiner, placement):
    """The forward divides by all keys of a bag, and so does its transpose (law 4); the norm covers sent gradients."""
    table = jaxsok.TableSpec(
        "user", 4, jaxsok.optim.sgd(1.0), capacity=256, initializer=jaxsok.initializers.zeros(), placement=placement
    )
    declared = programs.over(NUM_SHARDS, [table], [jaxsok.FeatureSpec("user", "user", combiner=combiner)])
    keys = np.arange(64).reshape(4, 16)
    gradients = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    raw = np.concatenate([keys, np.full((4, 4), -1)], axis=1)
    plan = declared.plan(programs.batch(declared, user=raw), send_capacity=(2,))
    _, state, plan = declared.lookup(declared.init(seed=0), plan)
    norm = declared.gradient_norm(state, plan, {"user": gradients})
    state, stats = declared.update(state, plan, {"user": gradients})
    rows = programs.rows_of(declared, state, "user")
    assert 0 < len(rows) < 64 and programs.total(stats, "num_refused") == 64 - len(rows)
    divisor = 16 if combiner == "mean" else 4
    for key, row in rows.items():
        np.testing.assert_allclose(row, -gradients[key // 16] / divisor, rtol=1e-5)
    np.testing.assert_allclose(norm, np.sqrt(sum(np.square(row).sum() for row in rows.values())), rtol=1e-5)


# --------------------------------------------------------------------------------------------------------------
# Capacities

PLACEMENTS = [jaxsok.SHARDED, jaxsok.REPLICATED, *map(jaxsok.on, range(3))]


@given(
    placement=st.lists(st.sampled_from(PLACEMENTS), min_size=1, max_size=4),
    num_shards=st.sampled_from([4, 8]),
    num_keys=st.lists(st.sampled_from([0, 1, 8, 40, 512]), min_size=4, max_size=4),
)
def test_default_send_capacity(placement, num_shards, num_keys):
    """The default has room for evenly spread keys and for a device's largest load on one owner, and little more."""
    tables = [jaxsok.TableSpec(f"t{i}", 4, SGD, placement=where) for i, where in enumerate(placement)]
    features = [jaxsok.FeatureSpec(f"t{i}", f"t{i}") for i in range(len(tables))]
    sizes = {f"t{i}": num_keys[i] for i in range(len(tables))}
    # A batch has one number of samples, so each feature gets its own batch.
    packed = [
        jaxsok.Collection(tables, [feature]).batch({feature.name: np.zeros(sizes[feature.name], np.int64)}).features
        for feature in features
    ]
    layouts = [layout for part in packed for store in part.stores for layout in store.layouts]
    for spec in programs.over(num_shards, tables, features).stores:
        names = [table.name for table in spec.tables]
        mine = [
            dataclasses.replace(layout, table=names.index(layout.name)) for layout in layouts if layout.name in names
        ]
        total = sum(layout.num_keys for layout in mine)
        keys = np.zeros((total, 2), np.uint32)
        store = dataclasses.replace(packed[0].stores[0], keys=keys, layouts=tuple(mine))
        capacity = exchange.default_send_capacity(spec, store)
        pinned = [sum(sizes[table.name] for table in spec.tables if table.placement == jaxsok.on(i)) for i in range(3)]
        spread = sum(sizes[table.name] for table in spec.tables if table.placement.kind != "on")
        # A replicated store has one destination: all shards.
        even = spread if spec.is_replicated else max(pinned) + spread / num_shards
        most = max(1024, 2 * total / num_shards)  # a larger batch takes several rounds
        assert capacity >= max(min(even, total, most), len(spec.tables))
        assert capacity <= max(16, 1.25 * even + 8)


@given(st.lists(st.integers(0, 2**24), min_size=2, max_size=2))
def test_rounded_capacity(loads):
    """From 128 on it is between the load and an eighth more; it is monotonic and idempotent."""
    low, high = sorted(loads)
    for load in loads:
        capacity = exchange.rounded_capacity(load)
        assert load <= capacity <= max(load + 16, load * 9 / 8)
        assert exchange.rounded_capacity(capacity) == capacity
    assert exchange.rounded_capacity(low) <= exchange.rounded_capacity(high)


def test_rounded_capacities_are_few():
    """An octave has eight capacities, which bounds the number of programs."""
    for octave in range(7, 13):
        loads = range(2**octave + 1, 2 ** (octave + 1) + 1)
        assert len({exchange.rounded_capacity(load) for load in loads}) == 8


NUM_LINES = 24


@functools.cache
def jitted_uses():
    """Returns `uses_of_rows`, compiled once."""
    return jax.jit(exchange.uses_of_rows)


@given(
    rows=st.lists(st.sampled_from([0, 1, 2, 7, 2**31, jaxsok.NO_ROW]), min_size=NUM_LINES, max_size=NUM_LINES),
    uses=st.lists(st.integers(0, 1000), min_size=NUM_LINES, max_size=NUM_LINES),
)
def test_uses_of_rows(rows, uses):
    """Every request for a row has the uses of all requests for it."""
    got = jitted_uses()(jnp.array(rows, jnp.uint32), jnp.array(uses, jnp.int32))
    rows, uses = np.array(rows), np.array(uses)
    assert got.tolist() == [int(uses[rows == row].sum()) for row in rows]


# --------------------------------------------------------------------------------------------------------------
# Another exchange


class TwoLevelRoute(exchange.Route):
    """A route within hosts first and then between them: two all-to-alls, each over an axis of the mesh."""

    def to_owners(self, lines):
        if self.is_replicated:
            return super().to_owners(lines)
        host, device = self.shards.axis
        sizes = self.shards.mesh.shape[host], self.shards.mesh.shape[device]
        parts = lines.reshape(*sizes, -1, *lines.shape[1:])
        parts = jax.lax.all_to_all(parts, device, 1, 1, tiled=True)
        return jax.lax.all_to_all(parts, host, 0, 0, tiled=True).reshape(lines.shape)

    def to_askers(self, lines):
        return super().to_askers(lines) if self.is_replicated else self.to_owners(lines)


class TwoLevels(exchange.Exchange):
    """An exchange that takes two hops."""

    def route(self, spec, send_capacity):
        return TwoLevelRoute(self.shards, spec.is_replicated, send_capacity)


@pytest.mark.parametrize("is_planned", [False, True])
def test_an_exchange_in_two_levels_gives_the_same_bits(is_planned):
    """Another exchange implements `Exchange` and `Route`; lookup and update do not change."""
    tables = [
        jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.1), capacity=64),
        jaxsok.TableSpec("ad", 4, jaxsok.optim.adam(0.1), capacity=64, placement=jaxsok.REPLICATED),
    ]
    features = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("ads", "ad", combiner="mean")]
    mesh = jax.sharding.Mesh(programs.mesh(4).devices.reshape(2, 2), ("host", "device"))

    def run(make_exchange):
        collection = jaxsok.Collection(tables, features, mesh=mesh, axis=("host", "device"))
        shards = collection.shards
        strategy = Exchanged(shards, make_exchange(shards, collection.exchange))
        collection._steps = dataclasses.replace(collection._steps, strategy=strategy)
        step = jax.jit(programs.train_step(collection))
        state, losses = collection.init(seed=3, salt=0), []
        for number in range(3):
            rng = np.random.default_rng(number)
            raw = {"user": rng.integers(0, 40, 16), "ads": rng.integers(0, 20, (16, 3))}
            asked = collection.batch(raw).features
            if is_planned:
                asked = collection.plan(asked, send_capacity=[16] * len(collection.stores))
            state, loss, stats = step(state, asked)
            stats.check()
            losses.append(loss)
        return state, jax.tree.map(np.asarray, losses)

    (flat, losses), (two_levels, others) = run(exchange.Exchange), run(TwoLevels)
    programs.assert_same_state(flat, two_levels)
    jax.tree.map(np.testing.assert_array_equal, losses, others)
    assert flat.stores[0].table_rows.sum() > 0


def equations_of(jaxpr):
    """Yields the equations of a jaxpr and of all that it contains."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations_of(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("placement", [jaxsok.SHARDED, jaxsok.on(1), jaxsok.REPLICATED])
def test_no_index_without_elements(placement):
    """Inside of a mesh program XLA's compiler (jaxlib 0.11.2) ends the process on one, also if a round has all room."""
    tables = [jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.1), capacity=64, placement=placement)]
    declared = programs.over(2, tables, [jaxsok.FeatureSpec("user", "user")])
    features = programs.batch(declared, user=np.arange(8))
    jaxpr = jax.make_jaxpr(programs.train_step(declared))(declared.init(seed=0), features).jaxpr
    scatters = [equation for equation in equations_of(jaxpr) if equation.primitive.name.startswith("scatter")]
    assert scatters and all(equation.invars[1].aval.size for equation in scatters)
