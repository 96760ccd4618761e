"""Applies new exports and deltas from a folder, in order of their names (`delta-9` before `delta-10`)."""

import logging
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxsok import checks
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint.saved import Source
from jaxsok.serving.artifact.model import MANIFEST as MODEL
from jaxsok.serving.ready import Repeated

_log = logging.getLogger(__name__)

RETRY_S = 60.0
_Order: TypeAlias = list[tuple[int, str]]
_DENSE, _HPS_ROWS = "dense", "emb_vector"
_UNFINISHED = re.compile(r"^\.|\.(writing|tmp|partial)$")


class _Export(NamedTuple):
    """A folder that a session can be updated from."""

    path: pathlib.Path
    kind: Literal["full", "delta"]
    parts: frozenset[str | None]
    """Its tables by name, and None for a dense model."""

    @property
    def tables(self) -> pathlib.Path | None:
        """The folder of the tables; None: there is a dense model alone."""
        below = self.path / "tables"
        return below if below.is_dir() else self.path if self.parts != {None} else None


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
        """Applies new folders, but for those that later ones replace; returns how many were applied.

        A refused folder stops no other, and replaces none. It is tried again after another one was applied, and each
        minute.
        """
        num_applied = 0
        for model in self._session.models:
            try:
                pending = self._find(model)
            except OSError as error:
                self._refuse(model, self.folder, error)
                continue
            left = list(range(len(pending)))
            while (number := _find_needed(pending, left)) is not None:
                is_applied = self._apply(model, pending, number)
                left = [other for other in left if other > number or (other < number and not is_applied)]
                num_applied += is_applied
        return num_applied

    def _find(self, model: str) -> list[_Export]:
        folder = self.folder / model
        if not folder.is_dir() or _read_export(folder) is not None:
            if len(self._session.models) > 1:
                return []
            folder = self.folder
        pending = []
        for path in sorted(folder.iterdir(), key=_order):
            if path in self._done or _UNFINISHED.search(path.name):
                continue
            try:
                export = _read_export(path)
            except OSError as error:
                self._refuse(model, path, error)
                continue
            if export is not None and model in self._last and _order(path) < self._last[model]:
                _log.warning("watch: %s stands before what model %s has; it is skipped", path, model)
                self._finish(model, path, "skipped")
            elif export is not None:
                pending.append(export)
        return pending

    def _apply(self, model: str, pending: Sequence[_Export], number: int) -> bool:
        export = pending[number]
        path, tables = export.path, export.tables
        failed_at, _ = self._refused.get(path, (-RETRY_S, ""))
        if self.is_stopping() or time.monotonic() - failed_at < RETRY_S:
            return False
        options = {"dense_file": str(path / _DENSE)} if None in export.parts else {}
        try:
            version = self._session.update(None if tables is None else str(tables), model=model, **options)
        except Exception as error:
            self._refuse(model, path, error)
            return False
        _log.info("watch: %s: model %s is at version %s", path, model, version)
        self._last[model] = _order(path)
        self._finish(model, path, "applied")
        for before in pending[:number]:
            if before.path not in self._done:
                self._finish(model, before.path, "skipped")
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


def _find_needed(pending: Sequence[_Export], left: Sequence[int]) -> int | None:
    """Finds the first of the exports that are left all of whose parts no later full export has; None: there is none."""
    needed, replaced = None, None
    for number in reversed(left):
        kind, parts = pending[number].kind, pending[number].parts
        if replaced is None or not parts <= replaced:
            needed = number
            if kind == "full":
                replaced = parts | (replaced or frozenset())
    return needed


def _read_export(path: pathlib.Path) -> _Export | None:
    """Finds what an export has; None: it is no export, or is not complete yet."""
    if not path.is_dir():
        return None
    tables, dense = path / "tables", frozenset({None} if (path / _DENSE).exists() else ())
    if not tables.is_dir():
        tables = path
    if (tables / manifest_lib.NAME).is_file():
        try:
            manifest = Source.of("watch", tables).manifest
        except ValueError:
            return _Export(path, "delta", dense | {""})  # damaged: the session will refuse it
        kind = "delta" if manifest["kind"] == "delta" else "full"
        return _Export(path, kind, dense | manifest["tables"].keys())
    hps = {folder.name for folder in tables.iterdir() if (folder / _HPS_ROWS).is_file()}
    if (tables / _HPS_ROWS).is_file():
        hps = {""}  # the only table of its model
    if hps or (tables == path and (path / _DENSE / MODEL).is_file()):
        return _Export(path, "full", dense | hps)
    return None
