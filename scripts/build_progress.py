#!/usr/bin/env python3
"""Shows of a build's output what has been compiled so far, and everything if the build fails.

Reads pip's output from standard input, prints the lines in which ninja counts ("[3/40] Building ..."), and what CMake
found. Where pip ends with an error, its last lines follow. The exit status of pip is that of the pipe (`pipefail`).
"""

import re
import sys

SHOWN = re.compile(r"^\s*(\[\d+/\d+\] (?:Building|Linking)|-- jaxsok:|.*\b(?:error|FAILED)\b)")
LAST_LINES = 60

lines = []
for line in sys.stdin:
    lines.append(line)
    if SHOWN.match(line):
        print(re.sub(r"(Building \w+ object ).*/", r"\1", line.strip()), flush=True)
if not any(line.startswith("Successfully installed") for line in lines):
    print("".join(lines[-LAST_LINES:]), end="", file=sys.stderr)
