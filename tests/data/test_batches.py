"""Batches: their samples, their order and the processes' parts; interrupted reading resumes where it stopped."""

import collections
import itertools
import json
import pickle

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxsok
from jaxsok.data import ArraySource, Batches, BlockSource, JoinedSource, iterate


def read_in_one_process(source, batch_size, **options):
    """Returns the batches of all processes, as a single process reads them."""
    return Batches(source, batch_size, **{"process_index": 0, "process_count": 1} | options)


def numbers(num_samples: int, block_samples: int = 1 << 16) -> ArraySource:
    """Returns samples that hold their own places."""
    return ArraySource({"place": np.arange(num_samples)}, block_samples=block_samples)


def places(dataset) -> list[list[int]]:
    """Returns the samples of each batch."""
    return [batch["place"].tolist() for batch in dataset]


def flat(batches) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


@st.composite
def cases(draw):
    """Draws (source, batch_size, options without the process)."""
    streams = draw(st.sampled_from([1, 2, 3, 4]))
    factor = draw(st.sampled_from([1, 2, 3]))
    batch_size = 12 * factor
    num_samples = draw(st.integers(0, 150)) + 2 * batch_size
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any))
    parts, first = [], 0
    while first < num_samples:  # parts of about these sizes, each in blocks of its own
        size = min(sizes[len(parts) % len(sizes)], num_samples - first)
        block_samples = draw(st.integers(1, 40))
        parts.append(ArraySource({"place": np.arange(first, first + size)}, block_samples=block_samples))
        first += size
    start = draw(st.integers(0, num_samples - 2 * batch_size))
    stop = draw(st.integers(start + batch_size, num_samples))
    options = {
        "seed": draw(st.none() | st.integers(0, 2**40)),
        "num_streams": streams,
        "shuffle_batches": draw(st.integers(1, 5)),
        "start": start,
        "stop": draw(st.sampled_from([stop, stop - num_samples])) if stop < num_samples else None,
    }
    return JoinedSource(parts), batch_size, options


def test_what_is_no_dataset_is_refused_by_name():
    with pytest.raises(TypeError, match=r"iterate: dataset: got ArraySource, wanted Batches of a source"):
        iterate(ArraySource({"user": np.arange(4)}))


@hypothesis.given(case=cases(), epoch=st.integers(0, 3))
def test_an_epoch_has_each_sample_at_most_once(case, epoch):
    """Batches are full, come from the samples between start and stop, and are as many as fit."""
    source, batch_size, options = case
    batches = read_in_one_process(source, batch_size, **options)
    start, stop, _ = slice(options["start"], options["stop"]).indices(len(source))
    size = batch_size // options["num_streams"]
    assert len(batches) == (stop - start) // options["num_streams"] // size
    found = places(batches[i] for i in range(epoch * len(batches), (epoch + 1) * len(batches)))
    assert [len(batch) for batch in found] == [batch_size] * len(batches)
    assert len(set(flat(found))) == len(flat(found))
    assert set(flat(found)) <= set(range(start, stop))


@hypothesis.given(case=cases(), count=st.sampled_from([1, 2, 3, 4, 6, 12]), number=st.integers(0, 30))
def test_parts_of_the_processes_are_the_batch(case, count, number):
    """The concatenated parts form the batch for any number of processes, and all parts are equal in size."""
    source, batch_size, options = case
    streams = options["num_streams"]
    hypothesis.assume(streams % count == 0 or count % streams == 0)
    whole = read_in_one_process(source, batch_size, **options)[number]["place"].tolist()
    parts = [Batches(source, batch_size, **options, process_index=i, process_count=count) for i in range(count)]
    found = [part[number]["place"].tolist() for part in parts]
    assert [len(part) for part in found] == [batch_size // count] * count
    assert flat(found) == whole
    assert {len(part) for part in parts} == {len(read_in_one_process(source, batch_size, **options))}


@hypothesis.given(
    num_samples=st.integers(1, 60), batch_size=st.sampled_from([4, 8, 12]), ends=st.tuples(st.integers(), st.integers())
)
def test_without_a_seed_batches_follow_the_source(num_samples, batch_size, ends):
    """They equal slices of a list, without the remainder or with a smaller last batch."""
    plain = list(range(num_samples))
    start, stop = ends[0] % num_samples, ends[1] % num_samples + 1
    wanted = [plain[start:stop][i : i + batch_size] for i in range(0, max(0, stop - start), batch_size)]
    if not wanted:
        return
    options = {"start": start, "stop": stop, "drop_remainder": False}
    assert places(read_in_one_process(numbers(num_samples, 7), batch_size, **options)) == wanted
    two = [Batches(numbers(num_samples, 7), batch_size, **options, process_index=i, process_count=2) for i in (0, 1)]
    for part, begin in zip(two, (0, batch_size // 2), strict=True):
        assert places(part) == [batch[begin : begin + batch_size // 2] for batch in wanted]
    if len(wanted[0]) == batch_size:
        full = [batch for batch in wanted if len(batch) == batch_size]
        assert places(read_in_one_process(numbers(num_samples), batch_size, start=start, stop=stop)) == full


def test_streams_are_parts_of_the_source_in_order():
    """Without a seed, each batch has the next samples of every part."""
    batches = read_in_one_process(numbers(26), 4, num_streams=2)
    assert places(batches)[:2] == [[0, 1, 13, 14], [2, 3, 15, 16]]
    assert len(batches) == 6


def test_the_last_batch_may_be_smaller_and_shuffled():
    """Each sample occurs once; some processes have none of the last batch."""
    for source in (numbers(33, 5), Loaded([5] * 6 + [3])):
        parts = [Batches(source, 16, seed=1, num_streams=1, drop_remainder=False, process_index=i, process_count=4)
                 for i in range(4)]  # fmt: skip
        found = [places(part) for part in parts]
        assert [[len(batch) for batch in of_process] for of_process in found] == [[4, 4, 1], *[[4, 4, 0]] * 3]
        assert sorted(flat(flat(found))) == list(range(33))


def test_epochs_and_seeds_differ():
    """The same seed gives the same batches, from another object too."""

    def read(seed, epoch):
        return places(
            itertools.islice(
                read_in_one_process(numbers(200, 10), 20, seed=seed).repeat(3), 10 * epoch, 10 * epoch + 10
            )
        )

    found = {(seed, epoch): read(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}
    for epoch in found.values():
        assert sorted(flat(epoch)) == list(range(200))
        assert all(batch == sorted(batch) for batch in epoch)
    for first, other in itertools.combinations(found, 2):
        assert found[first] != found[other], (first, other)
    assert {key: read(*key) for key in found} == found


@pytest.mark.parametrize(("block_samples", "num_streams"), [(1000, 1), (1000, 2), (50, 2)])
def test_epochs_leave_out_other_samples(block_samples, num_streams):
    """Whatever the number of blocks, each sample is read in one of a few epochs."""
    batches = read_in_one_process(numbers(107, block_samples), 10, seed=3, shuffle_batches=5, num_streams=num_streams)
    of_epoch = [flat(places(batches[i] for i in range(10 * epoch, 10 * epoch + 10))) for epoch in range(12)]
    assert {len(set(epoch)) for epoch in of_epoch} == {100}
    assert set(flat(of_epoch)) == set(range(107))


def _blocks_of_first_window(epoch, num_streams):
    batches = read_in_one_process(numbers(4000, 10), 40, seed=5, shuffle_batches=5, num_streams=num_streams)
    return {place // 10 for place in flat(places(batches[i] for i in range(100 * epoch, 100 * epoch + 5)))}


@pytest.mark.parametrize("num_streams", [1, 4])
def test_a_window_mixes_its_batches_alone(num_streams):
    """A batch has samples of many blocks, all of which belong to its window."""
    found = places(read_in_one_process(numbers(4000, 10), 40, seed=5, shuffle_batches=5, num_streams=num_streams))
    blocks = [{place // 10 for place in batch} for batch in found]
    windows = [set().union(*blocks[i : i + 5]) for i in range(0, 100, 5)]
    # 200 samples fill 20 blocks, and may start and end in the middle of one in each stream.
    assert all(20 <= len(window) <= 20 + num_streams for window in windows)
    assert np.mean([len(batch) for batch in blocks]) > 15  # at most 20; a random 40 of 200 samples give 17.9
    together = collections.Counter(flat(windows))
    assert max(together.values()) <= 2, "a block is read in one window, or in two that follow each other"
    order = [min(window) for window in windows]
    assert order != sorted(order), "blocks come in another order"
    of_epoch = [_blocks_of_first_window(epoch, num_streams) for epoch in range(3)]
    assert all(len(first & other) < 10 for first, other in itertools.combinations(of_epoch, 2)), "in each epoch"


def test_shuffling_is_even():
    """Over many epochs a sample is in each batch equally often."""
    batches = read_in_one_process(numbers(20, 3), 5, seed=0, shuffle_batches=4)
    counts = np.zeros((4, 20))
    for index in range(4 * 1000):
        counts[index % 4, batches[index]["place"]] += 1
    # 1000 draws of probability 1/4 have a standard deviation of 13.7; the largest of 80 is within five of them.
    assert np.abs(counts - 250).max() < 5 * 13.7


def test_a_batch_is_a_function_of_its_number():
    """Batches may be read in any order, again, or from the end; Grain's datasets slice, repeat and transform them."""
    batches = read_in_one_process(numbers(100, 7), 10, seed=3)
    in_order = places(batches[i] for i in range(30))
    for i in (29, 3, 17, 3):
        assert batches[i]["place"].tolist() == in_order[i]
    assert batches[-1]["place"].tolist() == in_order[9]
    with pytest.raises(IndexError):
        batches[-11]
    assert places(batches.repeat(3)) == in_order
    assert places(batches[2:5]) == places(batches.slice(slice(2, 5))) == in_order[2:5]
    assert list(batches.map(lambda batch: batch["place"].sum())) == [sum(batch) for batch in in_order[:10]]
    assert "10 of 10 samples" in str(batches)
    assert places(pickle.loads(pickle.dumps(batches))) == in_order[:10]


def test_bags_of_several_streams_are_joined():
    """Ragged columns come in the order of the samples."""
    lengths = np.arange(40) % 3
    keys = np.repeat(np.arange(40), lengths)
    source = ArraySource({"place": np.arange(40), "tags": jaxsok.Bags(keys, lengths=lengths)}, block_samples=6)
    for batch in read_in_one_process(source, 8, seed=0, num_streams=4):
        assert batch["tags"].keys.tolist() == [place for place in batch["place"] for _ in range(place % 3)]
        assert np.diff(batch["tags"].offsets).tolist() == (batch["place"] % 3).tolist()


def test_the_default_is_a_stream_for_each_process(monkeypatch):
    """The default applies with a seed; JAX gives the number of the process and of processes."""
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: 1)
    assert places(Batches(numbers(8), 4)) == [[2, 3], [6, 7]]
    assert places(Batches(numbers(40, 5), 4, seed=0)) == places(
        Batches(numbers(40, 5), 4, seed=0, num_streams=2, process_index=1, process_count=2)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0, wanted an integer of at least 1"),
        ({"batch_size": 4.0}, "batch_size: got 4.0"),
        ({"batch_size": 101}, "batch_size: got 101 for 100 samples, 0 to 100, wanted at most as many"),
        ({"start": 90, "stop": 95}, "batch_size: got 8 for 5 samples"),
        ({"start": 90, "stop": 80}, "batch_size: got 8 for 0 samples"),
        ({"start": 90, "stop": 90, "drop_remainder": False}, "batch_size: got 8 for 0 samples"),
        ({"shuffle_batches": 0}, "shuffle_batches: got 0"),
        ({"num_streams": 0}, "num_streams: got 0"),
        ({"num_streams": 3}, "batch_size: got 8 for 3 streams and 1 processes, wanted a multiple of both"),
        ({"process_count": 3}, "batch_size: got 8 for 1 streams and 3 processes"),
        ({"batch_size": 12, "num_streams": 6, "process_count": 4}, "one of these two a multiple of the other"),
        ({"batch_size": 12, "num_streams": 2, "process_count": 3}, "one of these two a multiple of the other"),
        ({"process_count": 0}, "process_count: got 0"),
        ({"process_count": 2, "process_index": 2}, "process_index: got 2, wanted an integer from 0 to 1"),
        ({"process_index": -1}, "process_index: got -1"),
        ({"num_streams": 2, "drop_remainder": False}, "drop_remainder: got False with 2 streams, wanted one stream"),
        ({"seed": -1}, "seed: got -1"),
        ({"seed": 0.5}, "seed: got 0.5"),
    ],
)
def test_refusals(options, message):
    """Wrong options are refused before anything is read."""
    given = {"batch_size": 8, "process_index": 0, "process_count": 1} | options
    with pytest.raises(ValueError, match=f"Batches: .*{message}"):
        Batches(numbers(100), **given)


# Reading ahead --------------------------------------------------------------------------------------------------------


class Loaded(BlockSource):
    """Samples that hold their own places, in blocks; remembers which blocks were loaded."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.loads = []

    def load(self, block):
        self.loads.append(block)
        return {"place": np.arange(self.ends[block - 1] if block else 0, self.ends[block])}


@pytest.mark.parametrize("num_streams", [1, 2, 8])
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("block", [10, 50, 400])
def test_blocks_are_loaded_once_an_epoch(num_streams, seed, block):
    """Blocks that two streams share load twice; few blocks are kept, and a late thread may find its block dropped."""
    most_kept = max(8, 2 * (200 // block + 1 + 2 * num_streams))
    for num_threads in (0, 3):
        source = Loaded([block] * (4000 // block))
        batches = read_in_one_process(source, 40, seed=seed, num_streams=num_streams, shuffle_batches=5)
        assert len(places(iterate(batches, num_threads=num_threads))) == 100
        assert set(source.loads) == set(range(4000 // block))
        assert len(source.loads) <= (1.5 if num_threads else 1) * (4000 // block + num_streams - 1)
        assert len(source._kept) <= most_kept


def _change(batch):
    """Transforms a batch, in worker processes too."""
    return {"place": batch["place"] + 1000}


def make(num_samples=100, **options):
    """Returns three epochs of ten batches, transformed."""
    return read_in_one_process(numbers(num_samples, 7), num_samples // 10, seed=11, **options).map(_change).repeat(3)


@pytest.mark.parametrize("options", [{"num_threads": 1}, {"num_threads": 5}, {"num_ahead": 1}, {"num_threads": 0}])
def test_threads_keep_the_order(options):
    """Threads give the batches in the order of a sequential reader."""
    assert places(iterate(make(), **options)) == places(make()[i] for i in range(30))


@hypothesis.given(
    stops=st.lists(st.integers(0, 30), min_size=1, max_size=4), threads=st.lists(st.integers(1, 4), min_size=4)
)
def test_a_state_leads_to_the_next_batch(stops, threads):
    """States from within an epoch, from its end and from the last end work, as JSON and with other thread counts."""
    wanted = places(make()[i] for i in range(30))
    state = iterate(make()).get_state()
    reached = 0
    for stop, num_threads in zip(stops, threads, strict=False):
        iterator = iterate(make(), num_threads=num_threads)
        iterator.set_state(json.loads(json.dumps(state)))
        assert places(itertools.islice(iterator, stop)) == wanted[reached : reached + stop]
        reached = min(30, reached + stop)
        state = iterator.get_state()
    iterator.set_state(state)
    assert places(iterator) == wanted[reached:]


OTHERS = {
    "start": (numbers(100, 7), {"start": 8}),
    "stop": (numbers(100, 7), {"stop": 90}),
    "blocks": (numbers(100, 9), {}),
    "samples": (numbers(108, 7), {}),
}


@pytest.mark.parametrize("options", [{"seed": 3}, {"num_streams": 2}, {}], ids=["seed", "streams", "in order"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_other_samples_is_refused(options, other):
    """Its number would be that of other samples: some would be read twice, and others never."""
    source, limits = OTHERS[other]
    iterator = iterate(read_in_one_process(source, 8, **options, **limits))
    state = iterate(read_in_one_process(numbers(100, 7), 8, **options)).get_state()
    if options or other == "start":
        with pytest.raises(ValueError, match=r"iterate: state: got one of batches .*; make Batches as they were"):
            iterator.set_state(state)
    else:  # one stream in order: what is behind does not matter
        iterator.set_state(state)
    iterate(read_in_one_process(numbers(112, 7), 8, **options, stop=100)).set_state(state)  # files behind the others
    older = {name: state["batches"][0][name] for name in ("batch_size", "shuffle_batches", "num_streams", "seed")}
    iterator.set_state({**state, "batches": [older]})
    for forms in ([], [older, older]):
        with pytest.raises(ValueError, match="iterate: state: got one of batches"):
            iterator.set_state({**state, "batches": forms})


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("num_read", [0, 5, 11, 12, 13, 15])
def test_a_stream_in_order_goes_on_into_samples_that_were_added(num_read, is_whole):
    """It does so in its first epoch, behind whole batches; elsewhere the number would be that of other samples."""

    def read(num_samples, is_whole):
        batches = read_in_one_process(numbers(num_samples, 7), 16, drop_remainder=is_whole)
        return iterate(batches.repeat(3))

    before = read(203, is_whole)  # 12 batches, and 11 samples
    collections.deque(itertools.islice(before, num_read), maxlen=0)
    state = json.loads(json.dumps(before.get_state()))
    for num_samples, is_whole_after in ((320, is_whole), (400, not is_whole)):
        after = read(num_samples, is_whole_after)
        if num_read > 12:
            with pytest.raises(ValueError, match="iterate: state: got one of batches"):
                after.set_state(state)
            continue
        after.set_state(state)
        assert flat(places(itertools.islice(after, 2))) == list(range(16 * num_read, 16 * num_read + 32))


def test_the_state_of_numpy_options_is_json():
    """As that of Python's numbers."""
    options = {"shuffle_batches": np.int32(4), "seed": np.int64(3), "start": np.int64(1), "stop": np.int64(90)}
    options["drop_remainder"] = np.True_
    state = iterate(Batches(numbers(100), np.int64(8), **options, process_index=0, process_count=1)).get_state()
    plain = {name: int(value) for name, value in options.items()}
    assert json.loads(json.dumps(state)) == iterate(read_in_one_process(numbers(100), 8, **plain)).get_state()


def test_going_on_with_other_processes():
    """The streams stay the same, so two processes continue where one stopped."""
    options = {"seed": 2, "num_streams": 4}
    batches = iterate(read_in_one_process(numbers(200, 9), 8, **options).repeat(2))
    before = places(itertools.islice(batches, 30))
    state = batches.get_state()
    two = [iterate(Batches(numbers(200, 9), 8, **options, process_index=i, process_count=2).repeat(2)) for i in (0, 1)]
    for iterator in two:
        iterator.set_state(state)
    after = [flat(parts) for parts in zip(*(places(iterator) for iterator in two), strict=True)]
    assert before + after == places(read_in_one_process(numbers(200, 9), 8, **options).repeat(2))


def test_an_iterator_can_be_set_back():
    """The state of the beginning and that of any batch can be restored."""
    iterator = iterate(make())
    states = [iterator.get_state()]
    found = []
    for batch in iterator:
        found.append(batch["place"].tolist())
        states.append(iterator.get_state())
    for number in (0, 17, 30, 9):
        iterator.set_state(states[number])
        assert places(iterator) == found[number:]


def test_an_error_of_a_source_reaches_the_reader():
    """The error is raised for the batch that has it; earlier batches are given."""

    class Bad(Loaded):
        def load(self, block):
            if block == 3:
                raise OSError("block 3 is damaged")
            return super().load(block)

    iterator = iterate(read_in_one_process(Bad([10] * 5), 10))
    assert places(itertools.islice(iterator, 3)) == [list(range(i, i + 10)) for i in (0, 10, 20)]
    with pytest.raises(OSError, match="block 3 is damaged"):
        next(iterator)


def test_worker_processes_give_the_same():
    """Batches and order are the same, also after a return to an earlier state, within an epoch.

    test_packing.py resumes with new workers, at an epoch's end.
    """
    wanted = places(make()[i] for i in range(30))
    iterator = iterate(make(), num_workers=2)
    states, found = [iterator.get_state()], []
    for batch in itertools.islice(iterator, 20):
        found.append(batch["place"].tolist())
        states.append(iterator.get_state())
    assert found == wanted[:20]
    iterator.set_state(json.loads(json.dumps(states[13])))
    assert places(iterator) == wanted[13:]
    iterator.close()


@pytest.mark.parametrize(("saved", "read"), [(0, 2), (1, 0), (1, 2)])
def test_a_state_of_another_number_of_workers_is_refused(saved, read):
    first, iterator = iterate(make(), num_workers=saved), iterate(make(), num_workers=read)
    next(first)
    with pytest.raises(ValueError, match=f"got one of {saved} worker processes, wanted one of num_workers={read}"):
        iterator.set_state(first.get_state())
    first.close()
