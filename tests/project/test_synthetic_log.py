"""The synthetic log of the examples: its form, its keys, and the signal in its labels."""

import itertools
import pathlib
import sys

import numpy as np
import pytest

from jaxsok.data import criteo

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import synthetic_log  # noqa: E402


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """Returns a synthetic log of 60,000 rows, its path and its content."""
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    synthetic_log.write_log(path, 60_000, seed=3)
    return path, criteo.TextSource(path).take(slice(0, 60_000))


def test_synthetic_rows_have_the_form_of_criteos(synthetic):
    path, columns = synthetic
    assert len(columns["label"]) == 60_000
    first = path.read_bytes().split(b"\n", 1)[0].split(b"\t")
    assert len(first) == 40
    assert all(len(field) in (0, 8) for field in first[14:])
    fields = [line.split("\t") for line in path.read_text().splitlines()]
    for i, name in enumerate(criteo.CATEGORY_NAMES):
        assert columns[name].tolist() == [int(row[14 + i], 16) if row[14 + i] else -1 for row in fields]


def test_synthetic_keys_follow_a_power_law(synthetic):
    _, columns = synthetic
    for column in range(26):
        keys = columns[criteo.CATEGORY_NAMES[column]]
        missing = (keys == criteo.MISSING_KEY).mean()
        assert missing == pytest.approx(synthetic_log._MISSING_CATEGORIES[column], abs=0.01)
        unique, counts = np.unique(keys[keys != criteo.MISSING_KEY], return_counts=True)
        assert len(unique) <= synthetic_log.CARDINALITIES[column]
        if synthetic_log.CARDINALITIES[column] > 1000:
            counts = np.sort(counts)[::-1]
            # Rank r is drawn r + 1 times less often, so rank 0 is 10 times as frequent as rank 9, within its noise.
            assert 6 < counts[0] / counts[9] < 16
            assert counts[100:].sum() > 0.2 * counts.sum(), "a long tail"


def test_synthetic_labels_follow_the_planted_signal(synthetic):
    _, columns = synthetic
    probability = 1 / (
        1
        + np.exp(
            -synthetic_log.planted_logit(
                columns["integers"], np.stack([columns[name] for name in criteo.CATEGORY_NAMES], axis=1)
            )
        )
    )
    assert columns["label"].mean() == pytest.approx(0.25, abs=0.02)
    for low, high in itertools.pairwise(np.quantile(probability, [0, 0.2, 0.4, 0.6, 0.8, 1])):
        rows = (probability >= low) & (probability <= high)
        # The bound is five standard deviations of a mean of 12,000 draws.
        assert columns["label"][rows].mean() == pytest.approx(probability[rows].mean(), abs=5 * 0.5 / 12_000**0.5)


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthetic_log.write_log(tmp_path / name, 1000, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_cached_log_is_written_once(tmp_path, monkeypatch):
    path = synthetic_log.cached_log(500, cache_dir=tmp_path / "cache")
    written = path.stat().st_mtime_ns
    assert synthetic_log.cached_log(500, cache_dir=tmp_path / "cache") == path
    assert path.stat().st_mtime_ns == written
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert synthetic_log.cached_log(500).parent == tmp_path / "xdg" / "jaxsok"


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic_log, "_write_chunk", interrupt)
    with pytest.raises(KeyboardInterrupt):
        synthetic_log.write_log(tmp_path / "log", 1000)
    assert list(tmp_path.iterdir()) == []
