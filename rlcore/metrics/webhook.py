"""Posts what somebody should know of a run to a URL: its warnings, its end, the error that ended
it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.metrics.health import Alarm
from rlcore.metrics.sinks import Sink
from rlcore.metrics.trackers import Calls

POST_S = 10.0


class WebhookSink(Sink):
    """Each event is one POST of a JSON object: `event` ("alarm", "ended" or "failed"), `run`,
    `text`, which chat services show, and of an alarm its `rule` and `step`. The run does not wait
    for it; a refusal is noted with the next event."""

    title = "the webhook (logging.webhook)"
    in_folder = False

    def __init__(self, run_dir: Path, url: str) -> None:
        self._run = str(run_dir)
        self._url = url
        self._calls = self._begin()

    def _begin(self) -> Calls:
        return Calls(self.title)

    def alarm(self, alarm: Alarm) -> None:
        text = f"step {alarm.step}: {alarm.text}"
        self._post("alarm", text, {"rule": alarm.rule, "step": alarm.step})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._post("ended", f"ended: {json.dumps(dict(summary), default=str)}")

    def failed(self, error: Exception) -> None:
        self._post("failed", f"failed: {error}")

    def close(self) -> None:
        self._calls.end()

    def _post(self, event: str, text: str, facts: Mapping[str, Any] | None = None) -> None:
        said = {"event": event, "run": self._run, "text": f"{self._run}: {text}", **(facts or {})}
        data = json.dumps(said).encode()
        try:
            self._calls.put(lambda: self._send(data))
        except Exception:
            self._calls = self._begin()  # no call is made after one that failed
            raise

    def _send(self, data: bytes) -> None:
        request = urllib.request.Request(
            self._url, data, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=POST_S):
            pass
