"""Applies new exports and deltas from a folder, in order of their names (`delta-9` before `delta-10`)."""

import logging
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Sequence, Set
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
    uuid: str | None = None
    """The `uuid` of its manifest, if it has one."""

    def source_of(self, names: Set[str | None]) -> str | dict[str | None, str] | None:
        """Returns what `Session.update` takes to change some of the tables; None: none of them."""
        tables = _folder_of_tables(self.path)
        if names == self.parts - {None}:
            return str(tables) if names else None
        return {name: str(below if _is_hps(below := tables / str(name)) else tables) for name in names} or None


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
        self._last: dict[tuple[str, str | None], _Order] = {}  # of the last folder that brought a model's part
        self._refused: dict[pathlib.Path, tuple[float, str]] = {}
        self.has_looked = threading.Event()  # set after the first look

    def _watch(self) -> float:
        try:
            self.look()
        except Exception:
            _log.exception("watch: %s", self.folder)
        self.has_looked.set()
        return self._interval_s

    def look(self) -> int:
        """Applies new folders, but for those that later ones replace; returns how many were applied.

        A refused folder stops no other, and replaces none. It is tried again after another one was applied, and each
        minute; if later folders have brought some of its parts meanwhile, only the others are applied.
        """
        num_applied = 0
        for model in self._session.models:
            try:
                left = self._find(model)
            except OSError as error:
                self._refuse(model, self.folder, error)
                continue
            while left:
                export = self._choose(model, left)
                left.remove(export)
                num_applied += self._apply(model, export)
                left = self._keep_needed(model, left, logging.INFO)
        return num_applied

    def _find(self, model: str) -> list[_Export]:
        folder = self.folder / model
        if not folder.is_dir() or _read_export(folder) is not None:
            if len(self._session.models) > 1:
                return []
            folder = self.folder
        pending, own = [], {*self._session.models[model].tables, None, ""}
        there = set(folder.iterdir())
        is_there = lambda path: path.parent != folder or path in there  # noqa: E731
        self._done = set(filter(is_there, self._done))  # a name may come back
        self._refused = {path: why for path, why in self._refused.items() if is_there(path)}
        for path in sorted(there, key=_order):
            if path in self._done or _UNFINISHED.search(path.name):
                continue
            try:
                export = _read_export(path)
            except OSError as error:
                self._refuse(model, path, error)
                continue
            if export is not None:
                pending.append(export._replace(parts=export.parts & own or export.parts))  # others would be refused
        return self._keep_needed(model, pending, logging.WARNING)  # of late ones

    def _find_lacking(self, model: str, export: _Export) -> frozenset[str | None]:
        """Finds the parts of an export that no later folder has brought."""
        order = _order(export.path)
        return frozenset(part for part in export.parts if order >= self._last.get((model, part), order))

    def _keep_needed(self, model: str, exports: Sequence[_Export], level: int) -> list[_Export]:
        """Leaves out the exports that lack nothing, since later folders have brought all of their parts."""
        needed = []
        for export in exports:
            if self._find_lacking(model, export):
                needed.append(export)
            else:
                _log.log(level, "watch: %s stands before what model %s has; it is skipped", export.path, model)
                self._finish(model, export.path, "skipped")
        return needed

    def _choose(self, model: str, exports: Sequence[_Export]) -> _Export:
        """Chooses the first export that brings a part which no later full one brings as well."""
        chosen, replaced = exports[-1], frozenset[str | None]()
        for export in reversed(exports):
            lacking = self._find_lacking(model, export)
            if not lacking <= replaced:
                chosen = export
                replaced |= lacking if export.kind == "full" else frozenset()
        return chosen

    def _apply(self, model: str, export: _Export) -> bool:
        path = export.path
        failed_at, _ = self._refused.get(path, (-RETRY_S, ""))
        if self.is_stopping() or time.monotonic() - failed_at < RETRY_S:
            return False
        needed = lacking = self._find_lacking(model, export)
        if export.uuid is not None:  # of a dense model nothing says where it comes from
            held = self._session.models[model]
            last = held.exports if export.kind == "full" else {}
            older = {} if self.has_looked.is_set() else held.opened  # a copy that comes later is to turn back
            known = {part: (last.get(part), *older.get(part, ())) for part in lacking - {None}}
            needed = frozenset(part for part in lacking if part is None or export.uuid not in known[part])
        if not needed:
            _log.info("watch: %s is what model %s holds already; it is skipped", path, model)
            self._note(model, export, lacking, "skipped")
            return False
        options = {"dense_file": str(path / _DENSE)} if None in needed else {}
        try:
            version = self._session.update(export.source_of(needed - {None}), model=model, **options)
        except Exception as error:
            self._refuse(model, path, error)
            return False
        _log.info("watch: %s: model %s is at version %s", path, model, version)
        self._note(model, export, lacking, "applied")
        # Those that were refused may fit now.
        self._refused = {path: (-RETRY_S, reason) for path, (_, reason) in self._refused.items()}
        return True

    def _note(self, model: str, export: _Export, parts: Set[str | None], result: str) -> None:
        """Notes that a model has parts of an export."""
        self._last |= {(model, part): _order(export.path) for part in parts}
        self._finish(model, export.path, result)

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
    parts = re.split(r"([0-9]+)", path.name)  # text and digits in turn
    return [(int(part), "") if number % 2 else (-1, part) for number, part in enumerate(parts)]


def _is_hps(path: pathlib.Path) -> bool:
    return (path / _HPS_ROWS).is_file()


def _folder_of_tables(path: pathlib.Path) -> pathlib.Path:
    below = path / "tables"
    return below if below.is_dir() and not _is_hps(below) else path


def _read_export(path: pathlib.Path) -> _Export | None:
    """Finds what an export has; None: it is no export, or is not complete yet."""
    if not path.is_dir():
        return None
    tables, dense = _folder_of_tables(path), path / _DENSE  # tables in HPS's form may have these names
    parts = frozenset({None} if dense.exists() and not _is_hps(dense) else ())
    if (tables / manifest_lib.NAME).is_file():
        try:
            manifest = Source.of("watch", tables).manifest
        except ValueError:
            return _Export(path, "delta", parts | {""})  # damaged: the session will refuse it
        kind = "delta" if manifest["kind"] == "delta" else "full"
        return _Export(path, kind, parts | manifest["tables"].keys(), manifest["uuid"])
    hps = {folder.name for folder in tables.iterdir() if _is_hps(folder)}
    if _is_hps(tables):
        hps = {""}  # the only table of its model
    if hps or (tables == path and (dense / MODEL).is_file()):
        return _Export(path, "full", parts | hps)
    return None
