"""A server of the Model Context Protocol in plain Python: adds, fails, draws and ends."""

import json
import sys

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
NAMES = ("add", "fail", "draw", "end", "garbage")


def answer(asked):
    if asked["method"] == "initialize":
        return {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {}}
    if asked["method"] == "tools/list":
        # two pages
        names, cursor = (NAMES[2:], None) if "cursor" in asked["params"] else (NAMES[:2], "2")
        tools = [{"name": n, "description": f"{n}.", "inputSchema": SCHEMA} for n in names]
        return {"tools": tools, **({"nextCursor": cursor} if cursor else {})}
    name, given = asked["params"]["name"], asked["params"]["arguments"]
    if name == "end":
        sys.exit(3)
    if name == "garbage":
        print("no JSON", flush=True)
    if name == "draw":
        return {"content": [{"type": "image", "data": ""}]}
    if name == "fail":
        return {"content": [{"type": "text", "text": "it is broken"}], "isError": True}
    return {"content": [{"type": "text", "text": str(given["a"] + given["b"])}]}


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked or "method" not in asked:
            continue
        # what a server may say in between
        say({"method": "notifications/message", "params": {}})
        say({"id": "of-server", "method": "roots/list"})
        try:
            say({"id": asked["id"], "result": answer(asked)})
        except KeyError as error:
            say({"id": asked["id"], "error": {"code": -32602, "message": f"lacks {error}"}})


def say(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


main()
