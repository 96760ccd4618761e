"""The command line: `python -m jaxsok demo`, `bench`, `inspect`, `import`, `estimate`, `serve`, `freeze` and `flags`.

A command only finds its program and passes its arguments on.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import io
import json
import os
import pathlib
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax

from jaxsok.types import TableFullError

_SOURCES = pathlib.Path(__file__).resolve().parents[1]  # the checkout, or the folder of an installed wheel


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, by default with the arguments of this process; returns the exit status."""
    _open_streams()
    parser = argparse.ArgumentParser(prog="python -m jaxsok", description="Dynamic embedding tables for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Demo and benchmarks bring their own parsers.
    commands.add_parser("demo", add_help=False, help="trains a DLRM on a click log, and says how well it ranks")
    commands.add_parser("bench", add_help=False, help="times jaxsok here, with its limits and peers (bench --help)")
    _declare_inspect(commands.add_parser("inspect", help="reports what is in a checkpoint, an export or a file"))
    _declare_import(commands.add_parser("import", help="writes a checkpoint of TorchRec as an export of jaxsok"))
    _declare_estimate(commands.add_parser("estimate", help="counts the bytes that tables will take on each device"))
    _declare_serve(commands.add_parser("serve", help="answers lookups and predictions over HTTP"))
    _declare_freeze(commands.add_parser("freeze", help="writes tables into a folder for C and C++ programs"))
    flags = commands.add_parser("flags", help="prints compiler flags for C and C++ programs that use jaxsok.h")
    flags.add_argument("--cuda", action="store_true", help="of the library for tables on a GPU")
    options, rest = parser.parse_known_args(arguments)
    if options.command in ("demo", "bench"):
        try:
            program = _find_demo() if options.command == "demo" else _find_benchmarks()
        except ImportError as error:
            print(error, file=sys.stderr)
            return 2
        result = program.main(rest)
        return result if options.command == "demo" else 1 if result.failures else 0
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "serve":
        return _serve(options)
    runs_python = options.command in ("estimate", "import") and options.spec is not None
    if arguments is None and jax.config.jax_platforms is None and not runs_python:
        # Files are read on the CPU: JAX would take most of a GPU, which a training run may need. A Python file may need
        # the devices of its mesh.
        jax.config.update("jax_platforms", "cpu")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that it cannot encode must not fail what is done
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        texts = {"inspect": _inspect, "import": _import, "estimate": _estimate, "freeze": _freeze, "flags": _flags}
        text = texts[options.command](options)
        _print(text, BrokenPipeError)
    except (OSError, ValueError, TypeError, ImportError, MemoryError, TableFullError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _open_streams() -> None:
    """Opens the standard streams that the caller has closed: else a socket gets such a number, and serve aborts."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the least free number


def _print(text: str, ignored: type[OSError]) -> None:
    """Prints a text, and ignores such an error, as it comes when the reader has ended (`head`)."""
    try:
        print(text, flush=True)
    except ignored:  # when Python ends it would report this once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _declare_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Goes through the tables of a checkpoint or an export of jaxsok, of an HPS or SOK folder, or of a .parquet "
        "or .npz file: dims, dtypes, sizes, ranges of keys, norms, frequencies, ages."
    )
    parser.add_argument("path", metavar="PATH", help="file or folder; its kind follows from its content")
    parser.add_argument("--table", action="append", metavar="NAME", help="only this one; may be given several times")
    parser.add_argument("--picture", metavar="FILE", help="draws the histograms: .png, .svg or .pdf")
    parser.add_argument("--json", metavar="FILE", help="writes all numbers")


def _inspect(options: argparse.Namespace) -> str:
    from jaxsok import inspection

    _check_outputs(options)
    found = inspection.inspect(options.path, options.table)
    if options.json is not None:
        pathlib.Path(options.json).write_text(json.dumps(found.to_json(), indent=1) + "\n")
    if options.picture is not None:
        inspection.draw_reports(found.tables, options.picture)
    return str(found)


def _declare_import(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads tables with their optimizer state from a torch.distributed.checkpoint of TorchRec, or from a dump of "
        "dynamicemb, and writes them as an export, which jaxsok.checkpoint.load reads into any mesh."
    )
    parser.add_argument("system", choices=["torchrec"])
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder")
    parser.add_argument("folder", metavar="FOLDER", help="a new one, for the export")
    parser.add_argument(
        "--spec", metavar="SPEC", help="Python file, as of estimate; by default tables are declared from the files"
    )
    parser.add_argument("--table", nargs=2, action="append", default=[], metavar=("NAME", "THEIRS"), help="other names")
    parser.add_argument("--step", type=int, metavar="N", help="updates so far, which Adam needs")
    parser.add_argument("--rows-only", action="store_true", help="leaves optimizer state out")


def _import(options: argparse.Namespace) -> str:
    from jaxsok import checkpoint, inspection
    from jaxsok.collection import Collection
    from jaxsok.interchange import torchrec

    source, spec = options.checkpoint, options.spec
    renamed = dict(options.table)
    if spec is None:
        ours = {theirs: name for name, theirs in renamed.items()}
        tables = [
            dataclasses.replace(table, name=ours.get(table.name, table.name)) for table in torchrec.declare(source)
        ]
    else:
        tables = inspection.read_spec(spec).tables
    collection = Collection(tables, [])
    names = {table.name: table.name for table in tables} | renamed
    with_state = not options.rows_only
    state = torchrec.load(collection, collection.init(), source, names, with_state=with_state, step=options.step)
    num_rows = checkpoint.export_full(options.folder, collection, state).num_rows
    return "\n".join(
        f"{table.name}: {num_rows[table.name]} rows, {table.dtype}[{table.dim}], {table.optimizer.name}"
        for table in collection.tables
    )


def _declare_estimate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Counts the bytes of the tables that a .py file declares: it defines `tables` (and `features`) or a "
        "`collection`, and is run. Sizes may have units, as 141e9 or 80GiB."
    )
    parser.add_argument("spec", metavar="SPEC", help="Python file of declarations")
    parser.add_argument(
        "--num-rows",
        action="append",
        default=[],
        metavar="[TABLE=]N",
        help="rows that a table, or each one, will come to have; by default its capacity",
    )
    parser.add_argument("--shards", type=int, metavar="S", help="devices; by default 1, or those of the collection")
    parser.add_argument("--num-samples", type=int, metavar="N", help="of one device's part of a batch: counts a step")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="between two calls of grow")
    parser.add_argument("--device-bytes", metavar="B", help="memory of one device: whether it is enough")
    parser.add_argument("--picture", metavar="FILE", help="draws the parts: .png, .svg or .pdf")
    parser.add_argument(
        "--sample",
        metavar="FILE",
        help=".npz with an array for each feature, a line for each sample: hit rates of caches by their size; needs "
        "--num-samples",
    )
    parser.add_argument("--cache-picture", metavar="FILE", help="draws hit rates by cache size: .png, .svg or .pdf")


def _estimate(options: argparse.Namespace) -> str:
    from jaxsok import inspection
    from jaxsok.caches import cache_estimate
    from jaxsok.memory import memory_estimate

    _check_outputs(options)
    if options.sample is not None and options.num_samples is None:
        raise ValueError("estimate: --sample: got no --num-samples, wanted how many samples a device has in a batch.")
    if options.cache_picture is not None and options.sample is None:
        raise ValueError("estimate: --cache-picture: got no --sample, wanted the file with the keys of some batches.")
    declared = inspection.read_spec(options.spec)
    num_shards = options.shards if options.shards is not None else declared.num_shards or 1
    estimate = memory_estimate(
        declared.tables,
        declared.features,
        num_shards=num_shards,
        num_rows=_rows_of(options.num_rows, [table.name for table in declared.tables]),
        num_samples=options.num_samples,
        exchange=declared.exchange,
        steps=options.steps,
        device_bytes=None if options.device_bytes is None else _number("--device-bytes", options.device_bytes),
    )
    if options.picture is not None:
        inspection.draw_estimate(estimate, options.picture)
    if options.sample is None:
        return str(estimate)
    batches = inspection.read_batches(options.sample, declared.features, num_shards * options.num_samples)
    caches = cache_estimate(declared.tables, declared.features, batches, num_shards=num_shards)
    if options.cache_picture is not None:
        inspection.draw_cache_estimates(caches, options.cache_picture)
    return "\n\n".join(map(str, (estimate, *caches)))


def _check_outputs(options: argparse.Namespace) -> None:
    """Checks the output paths before a long pass."""
    for name in ("json", "picture", "cache-picture"):
        path = getattr(options, name.replace("-", "_"), None)
        if path is None:
            continue
        if not pathlib.Path(path).resolve().parent.is_dir():
            raise FileNotFoundError(f"{options.command}: --{name}: got {path}, wanted a file in a folder that exists.")
        if name != "json" and pathlib.Path(path).suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"{options.command}: --{name}: got {path}, wanted a file .png, .svg or .pdf.")


def _rows_of(given: Sequence[str], tables: Sequence[str]) -> int | dict[str, int] | None:
    rows: dict[str, int] = {}
    for text in sorted(given, key=lambda text: "=" in text):  # a number for all tables first
        table, equals, number = text.rpartition("=")
        if equals and table not in tables:
            raise ValueError(f'estimate: --num-rows: got table "{table}", wanted one of {list(tables)}.')
        rows |= dict.fromkeys([table] if equals else tables, _number("--num-rows", number))
    return rows or None


def _number(option: str, text: str) -> int:
    number, found = -1.0, re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) ?([KMGT]?)(i?)B?", text)
    with contextlib.suppress(ValueError):
        if found and (found[2] or not found[3]):
            number = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")
    if number < 0 or not number.is_integer():
        raise ValueError(f"estimate: {option}: got {text!r}, wanted a number, as 1000000, 141e9 or 80GiB.")
    return int(number)


def _declare_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Opens the models of an HPS configuration and answers over HTTP until SIGTERM or SIGINT; docs/server.md has "
        "the endpoints. Needs pip install 'jaxsok[serving]'."
    )
    whole, seconds = int, float
    parser.add_argument("config", metavar="CONFIG", help="HPS JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; by default of this machine alone")
    parser.add_argument("--port", type=whole, default=8500, help="0: any that is free")
    text = "that read requests and write responses; 1: the process that has the tables does it"
    parser.add_argument("--processes", type=whole, default=1, metavar="N", help=text)
    parser.add_argument("--watch", metavar="FOLDER", help="applies exports and deltas that appear in it, in order")
    parser.add_argument("--watch-interval-s", type=seconds, default=2.0, metavar="S", help="between two looks")
    parser.add_argument("--access-log", action="store_true", help="a line for each request")
    parser.add_argument("--token-file", metavar="FILE", help="tokens, one a line: each request must have one of them")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate in PEM, with those up to its root: for HTTPS")
    parser.add_argument("--tls-key", metavar="FILE", help="its key in PEM; default: in the file of the certificate")
    for name, kind, text in (
        ("max-delay-ms", float, "while a call is under way, a request waits so long for others to share its own"),
        ("max-body-bytes", whole, "of one request"),
        ("max-held-bytes", whole, "of all requests until their responses are sent"),
        ("max-requests", whole, "requests whose response is not sent"),
        ("max-keys", whole, "of one request"),
        ("max-json-values", whole, "numbers in one JSON response"),
        ("max-response-bytes", whole, "of the arrays of one response"),
        ("body-timeout-s", seconds, "for a body to arrive"),
        ("timeout-s", seconds, "for a request to be answered"),
        ("send-timeout-s", seconds, "for a client's system to take 64 KiB of its response"),
        ("min-send-rate", float, "bytes a second that a client takes of a response on the whole, after that"),
        ("keep-alive-s", seconds, "for a connection without a request"),
        ("num-workers", whole, "calls at the same time, by model and endpoint"),
        ("drain-s", seconds, "after a signal: not ready, but still answering"),
        ("shutdown-s", seconds, "then: for what was taken to be finished"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=text)


class _Ended(BaseException):
    """A signal, by number, came before the server had its own handlers."""


@contextlib.contextmanager
def _closing_at_signals() -> Iterator[list[int]]:
    """Has signals that would end the process at once raise, as Ctrl-C does, so that what is open is closed.

    A second one ends the process. Gives the signals that it has changed.
    """

    def end(number: int, _: Any) -> None:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)
        raise _Ended(number)

    is_main = threading.current_thread() is threading.main_thread()
    ending = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    changed: list[int] = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, end)
    try:
        yield changed
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _serve(options: argparse.Namespace) -> int:
    try:
        from jaxsok.serving import session
        from jaxsok.serving.http import processes, running, security, server, watch
    except ImportError as error:
        print(f"serve: {error}; run pip install 'jaxsok[serving]'.", file=sys.stderr)
        return 2
    processes.log_to_stderr()
    try:
        server_options = server.ServerOptions.of(vars(options))
        of_clients = security.Security.of(vars(options))
        if options.processes < 1:
            raise ValueError(f"serve: --processes: got {options.processes}, wanted 1 or more.")
        watch.require_interval(options.watch_interval_s)
        # Checks address and folder first: a model may take minutes to load.
        with contextlib.ExitStack() as stack:
            sockets = processes.bind(options.host, options.port, options.processes)
            for where in sockets:
                stack.enter_context(where)
            if options.watch is not None:
                watch.require_folder(options.watch)
            if options.processes > 1:
                processes.prepare()
            watched = {"watch": options.watch, "watch_interval_s": options.watch_interval_s}

            def begin(found: running.Server | processes.Processes) -> None:
                # All that is there now stays: a full collection that visits it holds up all requests for 0.1 s, several
                # times a second. Versions that updates replace need no collection: nothing in them refers in a cycle.
                gc.collect()
                gc.freeze()
                _print(f"serve: answers at {found.address}", OSError)

            ran = {"security": of_clients, "access_log": options.access_log, "on_ready": begin}
            with _closing_at_signals() as caught:
                opened = session.open(options.config)
                try:
                    _print(opened.report(), OSError)
                    app = server.App(opened, server_options, has_front_ends=options.processes > 1, **watched)
                    if options.processes > 1:
                        found = processes.Processes(app, sockets, **ran)
                    else:
                        found = running.Server(app, sockets[0], **ran)
                    if signal.SIGHUP in caught:
                        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
                    found.run()
                except BaseException:
                    opened.close(server_options.shutdown_s)  # where the server has not
                    raise
    except (OSError, ValueError, TypeError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    except _Ended as ended:
        sys.stderr.flush()
        signal.raise_signal(ended.args[0])  # as it would have ended without anything to close
    if app.num_running:
        # Python waits for all threads, so a call that never returns would keep it running.
        print(f"serve: ended, with {app.num_running} calls of the session cut off", file=sys.stderr, flush=True)
        os._exit(1)
    _print("serve: ended", OSError)
    if not app.is_closed:  # a second SIGINT, or a compiler, for which Python would wait
        sys.stderr.flush()
        os._exit(0)
    return 0


def _declare_freeze(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads an export, a delta with its chain, a step of a checkpoint, or the tables of an HPS configuration, and "
        "writes rows and index into a new folder, which jaxsok_open of jaxsok.h maps."
    )
    parser.add_argument("source", metavar="SOURCE", help="folder, or the .json file of the configuration")
    parser.add_argument("folder", metavar="FOLDER", help="a new one")
    parser.add_argument("--model", metavar="NAME", help="of the configuration, where it has several")
    parser.add_argument("--dtype", help="of the rows: float32, bfloat16, float16, int8 or float8_e4m3fn")
    parser.add_argument(
        "--device-share",
        type=float,
        default=1.0,
        metavar="X",
        help="share of each table's rows that a GPU keeps in its memory; the others stay in host memory (default: 1)",
    )


def _freeze(options: argparse.Namespace) -> str:
    from jaxsok import published, serving
    from jaxsok.serving.model import served

    published.require_new("freeze", options.folder)  # the tables may be large
    share = options.device_share
    given = served.open_for_export("freeze", options.source, options.model, options.dtype, hotness=share < 1)
    tables, _ = serving.freeze_records(given, device_share=share)
    serving.export_frozen(options.folder, tables)
    return "\n".join(
        f"{table.name}: {source.num_rows} rows, {table.dtype}[{table.dim}], {table.missing}" for table, source in given
    )


def _flags(options: argparse.Namespace) -> str:
    from jaxsok.kernels import library

    back_end = "cuda" if options.cuda else "cpu"
    folder, include = library.require(back_end).parent, pathlib.Path(__file__).parent / "include"
    return shlex.join([f"-I{include}", f"-L{folder}", f"-Wl,-rpath,{folder}", f"-ljaxsok_{back_end}"])


def _find_demo() -> ModuleType:
    """Imports train_dlrm.py of the checkout around this package, or of the wheel."""
    places = _SOURCES / "examples", _SOURCES / "jaxsok_tools" / "examples"
    folder = next((place for place in places if (place / "train_dlrm.py").exists()), None)
    if folder is None:
        raise ImportError(
            f"demo: got no train_dlrm.py in {' or '.join(map(str, places))}, wanted the one that comes with jaxsok; "
            "install the wheel again, or run `make demo` in a checkout of the sources."
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # the examples import each other by name, as they do when they are run
    try:
        return importlib.import_module("train_dlrm")
    except ImportError as error:
        raise ImportError(f"demo: {error}; run pip install 'jaxsok[demo]'.") from error


def _find_benchmarks() -> ModuleType:
    """Imports the benchmarks of the checkout around this package, or of the wheel."""
    if (_SOURCES / "benchmarks" / "run.py").exists() and (_SOURCES / "pyproject.toml").exists():
        if str(_SOURCES) not in sys.path:
            sys.path.insert(0, str(_SOURCES))
        return importlib.import_module("benchmarks.run")
    if importlib.util.find_spec("jaxsok_tools") is None:
        raise ImportError(
            "jaxsok bench: got no benchmarks next to the installed package, wanted jaxsok_tools of the same wheel; "
            "install the wheel again, or run `make bench` in a checkout of the sources, where they are in benchmarks/."
        )
    return importlib.import_module("jaxsok_tools.benchmarks.run")


if __name__ == "__main__":
    sys.exit(main())
