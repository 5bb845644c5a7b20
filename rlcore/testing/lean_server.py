"""A stand-in for a Lean server: the protocol of kimina-lean-server, and no Lean.

`python -m rlcore.testing.lean_server PORT` serves it. It accepts a proof if its last tactic is
`norm_num`, and answers other contents as the Lean REPL does (`answer`). It checks no proof.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STANDARD = ["propext", "Classical.choice", "Quot.sound"]
ASKED = re.compile(r"#print axioms (\S+)\s*\Z")


def answer(source: str, timeout_s: int) -> dict[str, Any]:
    """The `error` and `response` of one source.

    `hang` in it takes longer than the limit, `crash` ends the REPL, and `slow_import` does not load
    in time. sorry and native_decide rest on their axioms, an open comment hides what follows.
    """
    for word, error in (
        ("slow_import", f"Lean REPL header command timed out in {timeout_s} seconds"),
        ("hang", f"Lean REPL command timed out in {timeout_s} seconds"),
        ("crash", "Lean REPL process terminated"),
    ):
        if word in source:
            return {"error": error}
    asked = ASKED.search(source)
    open_comment = source.count("/-") > source.count("-/")
    proof = source[: asked.start()] if asked else source
    messages, sorries = [], []
    if "sorry" in proof:
        messages.append(_message("warning", "declaration uses 'sorry'"))
        sorries.append({"pos": {"line": 1, "column": 0}, "goal": "|- False"})
    elif open_comment:
        messages.append(_message("error", "unterminated comment"))
    elif proof.split()[-1:] != ["norm_num"] and "native_decide" not in proof:
        messages.append(_message("error", "unsolved goals"))
    if asked and not open_comment:
        axioms = [*STANDARD, *(["sorryAx"] if "sorry" in proof else [])]
        axioms += ["Lean.ofReduceBool"] if "native_decide" in proof else []
        listed = f"'{asked[1]}' depends on axioms: [{', '.join(axioms)}]"
        messages.append(_message("info", listed))
    return {"response": {"env": 0, "messages": messages, "sorries": sorries, "time": 0.1}}


def _message(severity: str, text: str) -> dict[str, Any]:
    place = {"line": 1, "column": 0}
    return {"severity": severity, "pos": place, "endPos": place, "data": text}


def verify(body: Any) -> dict[str, Any]:
    """The reply to a request of /verify."""
    results = [
        {"custom_id": code["custom_id"], **answer(code["proof"], body["timeout"])}
        for code in body["codes"]
    ]
    return {"results": results}


class _LeanHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._reply({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._reply(verify(body))

    def _reply(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def main(port: int) -> None:
    ThreadingHTTPServer(("127.0.0.1", port), _LeanHandler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
