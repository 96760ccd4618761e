"""MovieLens logs: a reader of GroupLens' 100K format, and a writer of synthetic logs in it.

A log is two files of one folder: `u.data`, a line for each rating (user, item, rating, seconds since 1970, separated by
tabs, in no order), and `u.item`, a line for each item (24 fields separated by `|`, the last 19 of which say 1 for each
genre that it has). Ids are keys as they are, without a vocabulary.

The data set is at https://grouplens.org/datasets/movielens/100k/. Its licence forbids handing it on.
"""

import dataclasses
import os
import pathlib

import numpy as np

GENRE_NAMES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
NUM_GENRES = len(GENRE_NAMES)
LIKED = 4
"""The least rating of an item that was liked."""
_NUM_FIELDS = 5 + NUM_GENRES
_START = 874_724_710  # of the synthetic log: in September 1997, as GroupLens' own


class LogFormatError(ValueError):
    """A line is not in the format; the message names file, line, field, what was got and wanted."""


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Ratings in the order in which they came."""

    user: np.ndarray
    """int64 [ratings]"""
    item: np.ndarray
    """int64 [ratings]"""
    rating: np.ndarray
    """int64 [ratings], 1 to 5."""
    seconds: np.ndarray
    """int64 [ratings], since 1970 (UTC); never falling."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self.user)

    @property
    def hour(self) -> np.ndarray:
        """int64 [ratings]: the hour of the day, 0 to 23 (UTC)."""
        return self.seconds // 3600 % 24

    @property
    def liked(self) -> np.ndarray:
        """float32 [ratings]: 1 where the rating is 4 or 5."""
        return (self.rating >= LIKED).astype(np.float32)

    def part(self, start: int, stop: int) -> "Ratings":
        """Those from `start` to `stop` in their order."""
        return Ratings(*(getattr(self, field.name)[start:stop] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Genres:
    """The genres of each item: bags of keys."""

    items: np.ndarray
    """int64 [items], ascending."""
    offsets: np.ndarray
    """int64 [items + 1]: where the genres of each begin among `keys`."""
    keys: np.ndarray
    """int64: positions in GENRE_NAMES."""

    @property
    def most(self) -> int:
        """Genres of an item at most."""
        return int(np.diff(self.offsets).max(initial=1))

    def bags(self, item: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The genres of some items, one bag after the other; none for an item that `u.item` does not have.

        Returns:
          keys, and the number of them in each bag.

        Example:
          >>> genres = Genres(np.array([7, 9]), np.array([0, 2, 3]), np.array([1, 16, 5]))
          >>> keys, lengths = genres.bags(np.array([9, 8, 7]))
          >>> keys.tolist(), lengths.tolist()
          ([5, 1, 16], [1, 0, 2])
        """
        place = np.searchsorted(self.items, item).clip(max=len(self.items) - 1)
        is_known = self.items[place] == item
        lengths = np.where(is_known, np.diff(self.offsets)[place], 0)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self.keys[np.repeat(self.offsets[place], lengths) + within], lengths


def read_ratings(path: str | os.PathLike) -> Ratings:
    """Reads `u.data`, and puts the ratings in the order of their times (of the file, where times are equal).

    Raises:
      LogFormatError: a line is not in the format.
      OSError: there is no such file.
    """
    rows = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) != 4 or not all(field.lstrip("-").isdigit() for field in fields):
            raise LogFormatError(
                f"read_ratings: {path}, line {number}: got {line!r}, wanted user, item, rating and seconds, integers "
                "separated by tabs."
            )
        rows.append([int(field) for field in fields])
        if not 1 <= rows[-1][2] <= 5:
            raise LogFormatError(f"read_ratings: {path}, line {number}: rating: got {rows[-1][2]}, wanted 1 to 5.")
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    order = np.argsort(columns[3], kind="stable")
    return Ratings(*columns[:, order])


def read_genres(path: str | os.PathLike) -> Genres:
    """Reads `u.item`, of which only the ids and the genres are used.

    Raises:
      LogFormatError: a line is not in the format, or an item is there twice.
      OSError: there is no such file.
    """
    genres: dict[int, list[int]] = {}
    for number, line in enumerate(pathlib.Path(path).read_text(encoding="latin-1").splitlines(), start=1):
        fields = line.split("|")
        flags = fields[-NUM_GENRES:]
        if len(fields) != _NUM_FIELDS or not fields[0].isdigit() or not set(flags) <= {"0", "1"}:
            raise LogFormatError(
                f"read_genres: {path}, line {number}: got {line!r}, wanted an item's id, four texts and {NUM_GENRES} "
                "times 0 or 1, separated by |."
            )
        if int(fields[0]) in genres:
            raise LogFormatError(f"read_genres: {path}, line {number}: item: got {fields[0]} twice, wanted one line.")
        genres[int(fields[0])] = [genre for genre, flag in enumerate(flags) if flag == "1"]
    items = sorted(genres)
    lengths = [len(genres[item]) for item in items]
    keys = [genre for item in items for genre in genres[item]]
    return Genres(np.array(items, np.int64), np.cumsum([0, *lengths]), np.array(keys, np.int64))


# ------------------------------------------------------------------------------------------------------ synthetic logs


def write_log(folder: str | os.PathLike, num_ratings: int, *, num_users: int, num_items: int, seed: int = 0) -> None:
    """Writes a synthetic `u.data` and `u.item`.

    Users arrive one after the other and come back, few items have most of the ratings, and a rating follows from the
    tastes of its user: a direction in a space of eight, along which items and genres lie.

    Args:
      folder: where; made if it is not there.
      num_ratings: lines of `u.data`.
      num_users: users at most; ids are numbers without order.
      num_items: lines of `u.item`.
      seed: of all that is random.
    """
    rng = np.random.default_rng(seed)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    user_ids = rng.choice(10 * num_users, num_users, replace=False) + 1
    item_ids = rng.choice(10 * num_items, num_items, replace=False) + 1
    has_genre = rng.random((num_items, NUM_GENRES)) < 0.09
    has_genre[np.arange(num_items), rng.integers(1, NUM_GENRES, num_items)] = True

    of_genre = rng.normal(size=(NUM_GENRES, 8))
    of_item = (has_genre / has_genre.sum(1, keepdims=True)) @ of_genre + 0.5 * rng.normal(size=(num_items, 8))
    of_user = rng.normal(size=(num_users, 8))
    arrived = np.arange(num_ratings) / num_ratings  # of the users have come by then
    user = (rng.random(num_ratings) * np.maximum(arrived * num_users, 1)).astype(int)
    item = (num_items * rng.random(num_ratings) ** 2).astype(int)
    taste = (of_user[user] * of_item[item]).sum(1) + 0.5 * rng.normal(size=num_items)[item]
    rating = np.clip(np.round(3.5 + 0.7 * taste + 0.4 * rng.normal(size=num_ratings)), 1, 5).astype(int)
    seconds = _START + np.cumsum(rng.integers(0, 400, num_ratings))

    lines = [f"{user_ids[u]}\t{item_ids[i]}\t{r}\t{s}" for u, i, r, s in zip(user, item, rating, seconds, strict=True)]
    (folder / "u.data").write_text("".join(f"{lines[i]}\n" for i in rng.permutation(num_ratings)))
    items = [
        f"{item_ids[i]}|Item {i}|01-Jan-1995||http://example.com/{i}|" + "|".join(map(str, has_genre[i].astype(int)))
        for i in range(num_items)
    ]
    (folder / "u.item").write_text("".join(f"{line}\n" for line in items), encoding="latin-1")
