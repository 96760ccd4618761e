"""Writes tests/golden/initial_rows_v<VERSION>.json: the initial rows of fixed keys.

Run it only with a new VERSION, and only after a decision record has said why rows change: a checkpoint made before
would meet other initial rows. `python tests/golden/make_golden.py` refuses to overwrite a file.
"""

import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

VERSION = 1
KEYS = (0, 1, 5, 2**32, 2**32 + 5, 2**63, 2**63 + 5, 2**64 - 2)
CASES = (
    # table, dim, seed, initializer, parameters
    ("user", 5, 0, "uniform", (-0.05, 0.05)),
    ("user", 5, 1, "uniform", (-0.05, 0.05)),
    ("item", 5, 0, "uniform", (-0.05, 0.05)),
    ("item", 8, 2**31, "normal", (0.01, 0.0)),
    ("a table of a long name, ä", 3, 7, "truncated_normal", (0.5, 1.0)),
    ("user", 2, 0, "constant", (0.1,)),
)


def main():
    """Writes the rows that `find` returns on fresh states."""
    import programs

    import jaxsok

    path = FOLDER / f"initial_rows_v{VERSION}.json"
    if path.exists():
        raise SystemExit(f"{path} exists: rows change only with a new VERSION and a decision record")
    cases = []
    for table, dim, seed, name, parameters in CASES:
        initializer = getattr(jaxsok.initializers, name)(*parameters)
        rows = programs.initial_rows(table, dim, KEYS, initializer=initializer, seed=seed)
        cases.append(
            {
                "table": table,
                "dim": dim,
                "seed": seed,
                "initializer": name,
                "parameters": parameters,
                "keys": [str(key) for key in KEYS],
                "rows": [[float(value).hex() for value in row] for row in rows],
            }
        )
    path.write_text(json.dumps({"version": VERSION, "cases": cases}, indent=1, ensure_ascii=False) + "\n")
    print(path)


if __name__ == "__main__":
    main()
