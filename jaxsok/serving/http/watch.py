"""Applies new exports and deltas from a folder, in order of their names (`delta-9` before `delta-10`)."""

import logging
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from jaxsok import checks
from jaxsok.serving import folders
from jaxsok.serving.ready import Repeated

_log = logging.getLogger(__name__)

RETRY_S = 60.0
_Order: TypeAlias = list[tuple[int, str]]
_Export: TypeAlias = tuple[pathlib.Path, Literal["full", "delta"]]
_UNFINISHED = re.compile(r"^\.|\.(writing|tmp|partial)$")


class Watcher(Repeated):
    """A thread that polls a folder; docs/server.md has its form.

    `observe` is called with the model and "applied", "skipped" or "refused" for each folder.
    """

    def __init__(
        self,
        session: Any,
        folder: str | os.PathLike[str],
        *,
        interval_s: float = 2.0,
        observe: Callable[[str, str], None] = lambda model, result: None,
    ) -> None:
        super().__init__("jaxsok-watch", self._watch)
        require_folder(folder)
        self.folder = pathlib.Path(folder)
        self._session, self._interval_s, self._observe = session, require_interval(interval_s), observe
        self._done: set[pathlib.Path] = set()
        self._last: dict[str, _Order] = {}  # of the last applied folder, by model
        self._refused: dict[pathlib.Path, tuple[float, str]] = {}

    def _watch(self) -> float:
        try:
            self.look()
        except Exception:
            _log.exception("watch: %s", self.folder)
        return self._interval_s

    def look(self) -> int:
        """Applies new folders, from the last full export that is not refused on; returns how many were applied.

        A refused folder stops no other. It is tried again after another one was applied, and each minute.
        """
        num_applied = 0
        for model in self._session.models:
            try:
                pending = self._find(model)
            except OSError as error:
                self._refuse(model, self.folder, error)
                continue
            fulls = [i for i, (_, kind) in enumerate(pending) if kind == "full"]
            last = next((i for i in reversed(fulls) if self._apply(model, pending, i)), None)
            deltas = range(0 if last is None else last + 1, len(pending))
            num_applied += last is not None
            num_applied += sum(self._apply(model, pending, i) for i in deltas if pending[i][1] == "delta")
        return num_applied

    def _find(self, model: str) -> list[_Export]:
        folder = self.folder / model
        if not folder.is_dir() or _kind_of(folder) is not None:
            if len(self._session.models) > 1:
                return []
            folder = self.folder
        pending = []
        for path in sorted(folder.iterdir(), key=_order):
            if path in self._done or _UNFINISHED.search(path.name):
                continue
            try:
                kind = _kind_of(path)
            except OSError as error:
                self._refuse(model, path, error)
                continue
            if kind is not None and model in self._last and _order(path) < self._last[model]:
                _log.warning("watch: %s stands before what model %s has; it is skipped", path, model)
                self._finish(model, path, "skipped")
            elif kind is not None:
                pending.append((path, kind))
        return pending

    def _apply(self, model: str, pending: Sequence[_Export], number: int) -> bool:
        path = pending[number][0]
        failed_at, _ = self._refused.get(path, (-RETRY_S, ""))
        if self.is_stopping() or time.monotonic() - failed_at < RETRY_S:
            return False
        tables, dense = path / "tables", path / "dense"
        options = {"dense_file": str(dense)} if dense.exists() else {}
        try:
            version = self._session.update(str(tables if tables.is_dir() else path), model=model, **options)
        except Exception as error:
            self._refuse(model, path, error)
            return False
        _log.info("watch: %s: model %s is at version %s", path, model, version)
        self._last[model] = _order(path)
        self._finish(model, path, "applied")
        for before, _ in pending[:number]:
            if before not in self._done:
                self._finish(model, before, "skipped")
        # Those that were refused may fit now.
        self._refused = {path: (-RETRY_S, reason) for path, (_, reason) in self._refused.items()}
        return True

    def _finish(self, model: str, path: pathlib.Path, result: str) -> None:
        self._done.add(path)
        self._observe(model, result)

    def _refuse(self, model: str, path: pathlib.Path, error: Exception) -> None:
        _, reason = self._refused.get(path, (0.0, ""))
        if str(error) != reason:  # logged once, not each minute
            _log.error("watch: %s was refused: %s", path, error)
            self._observe(model, "refused")
        self._refused[path] = (time.monotonic(), str(error))


def require_folder(folder: str | os.PathLike[str]) -> None:
    if not pathlib.Path(folder).is_dir():
        raise FileNotFoundError(f'serve: --watch: got "{folder}", wanted a folder that exists.')


def require_interval(interval_s: float) -> float:
    most = threading.TIMEOUT_MAX
    wanted = f"a number above 0, at most {most:g}"
    return checks.number("serve: --watch-interval-s", interval_s, checks.ABOVE_ZERO, most, wanted=wanted)


def _order(path: pathlib.Path) -> _Order:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", path.name)]


def _kind_of(path: pathlib.Path) -> Literal["full", "delta"] | None:
    """Finds the kind of an export; None: it is no export, or is not complete yet."""
    if not path.is_dir():
        return None
    path = path / "tables" if (path / "tables").is_dir() else path
    if (path / "manifest.json").is_file():
        try:
            return "delta" if folders.is_delta(path) else "full"
        except ValueError:
            return "delta"  # damaged: the session will refuse it
    if any((folder / "emb_vector").is_file() for folder in (path, *path.iterdir())):
        return "full"
    return None
