"""What a run notes about the machine and the source that it is done with."""

import getpass
import json
import socket

from rlcore.commands.about import about, write_about


def test_it_has_machine_and_versions_and_nothing_private(tmp_path):
    write_about(tmp_path)
    found = json.loads((tmp_path / "about.json").read_text())
    assert found == about()
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_gib"] > 0
    assert {"python", "torch", "ray"} <= set(found["versions"])
    text = json.dumps(found)
    assert socket.gethostname() not in text and str(tmp_path) not in text
    assert f'"{getpass.getuser()}"' not in text
