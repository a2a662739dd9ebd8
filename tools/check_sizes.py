"""Fail when a file or function outgrows the house limits.

Files: 500 lines, 700 for tests. Functions: 60 lines, 120 for Triton kernels.
"""

import ast
import subprocess
import sys
from pathlib import Path

MAX_FILE, MAX_TEST_FILE = 500, 700
MAX_FUNCTION, MAX_KERNEL = 60, 120


def problems(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    limit = MAX_TEST_FILE if path.parts[0] == "tests" else MAX_FILE
    found = [f"{path}: {lines} lines, at most {limit}"] if lines > limit else []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        kernel = any("jit" in ast.unparse(item) for item in node.decorator_list)
        allowed = MAX_KERNEL if kernel else MAX_FUNCTION
        if length > allowed:
            found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, limit {allowed}")
    return found


def main() -> int:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    # A file deleted from the working tree stays listed until that is staged.
    paths = [path for path in map(Path, listed.stdout.split()) if path.exists()]
    found = [line for path in paths for line in problems(path)]
    print("\n".join(found) or "file and function sizes are within limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
