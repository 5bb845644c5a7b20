"""Agents of others: conversations by chat templates, families of tool calls, programs that call the
model by HTTP, and adapters to environments of other packages.

`rlcore.environments` names the environments in its registry, and `rlcore.rooms` the rest.
"""
