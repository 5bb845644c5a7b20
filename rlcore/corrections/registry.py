"""The corrections by name. A specification names its method (`corrections/specs.py`). No torch."""

from __future__ import annotations

CORRECTIONS: dict[str, str] = {
    "tis": "rlcore.corrections.specs:TisSpec",
    "mis": "rlcore.corrections.specs:MisSpec",
    "icepop": "rlcore.corrections.specs:IcePopSpec",
    "veto": "rlcore.corrections.specs:VetoSpec",
    "opsm": "rlcore.corrections.specs:OpsmSpec",
    "dppo": "rlcore.corrections.specs:DppoSpec",
    "jackpot": "rlcore.corrections.specs:JackpotSpec",
    "vcpo": "rlcore.corrections.specs:VcpoSpec",
    "ais": "rlcore.corrections.specs:AisSpec",
    "dvp": "rlcore.corrections.specs:DvpSpec",
    "rapid": "rlcore.corrections.specs:RapidSpec",
}
