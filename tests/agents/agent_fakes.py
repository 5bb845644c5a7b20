"""Programs that call the model as an endpoint, good ones and others."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from timing import deadline

from rlcore.types import Grade

# For tokenizers of few characters: every message between signs that name its role.
TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'system': '=', 'user': '+', 'tool': '+', 'assistant': '-'}[m.role] }}"
    "{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}"
    "{% endfor %}{% if add_generation_prompt %}-{% endif %}"
)


def post(base_url, api_key, body, *, raw=None, timeout=60):
    """(status, answer) of one request."""
    data = raw if raw is not None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=deadline(timeout)) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def user(text):
    return {"role": "user", "content": text}


def plain(base_url, api_key, item, turns=3):
    """A plain HTTP loop: every answer is answered by its length."""
    messages = [user(item.question)]
    for turn in range(turns):
        status, answer = post(base_url, api_key, {"messages": messages})
        assert status == 200, answer
        said = answer["choices"][0]["message"]
        if turn < turns - 1:
            messages += [said, user(str(len(said["content"])))]
    return sum(len(m["content"]) for m in messages) / 100


def limited(base_url, api_key, item):
    """Few tokens a turn, more than the run allows, and what the answer says of it."""
    asked = {"model": "any", "messages": [user(item.question)], "temperature": 1.0, "n": 1}
    few = post(base_url, api_key, {**asked, "max_tokens": 2})[1]
    many = post(base_url, api_key, {**asked, "max_completion_tokens": 1000})[1]
    assert few["object"] == "chat.completion"
    lengths = [answer["usage"]["completion_tokens"] for answer in (few, many)]
    return 1.0, {"few": lengths[0], "many": lengths[1]}


def with_openai(base_url, api_key, item):
    """The openai client, which sends its own objects back."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [user(item.question)]
        for turn in range(3):
            answer = client.chat.completions.create(
                model="policy", messages=messages, temperature=1.0
            )
            said = answer.choices[0].message
            if turn < 2:
                messages += [said, user("5")]
        return float(answer.usage.total_tokens)


def streamed():
    """The openai client by the process's environment, and a stream."""
    from openai import OpenAI

    with OpenAI() as client:
        stream = client.chat.completions.create(
            model="policy",
            messages=[user("1")],
            stream=True,
            stream_options={"include_usage": True},
        )
        events = list(stream)
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert events[1].choices[0].finish_reason in ("stop", "length")
    assert events[-1].usage.completion_tokens >= len(text)
    return text  # for the task's grader


async def at_once(base_url, api_key):
    """Three conversations at a time, each of two turns, with the asynchronous client."""
    import asyncio

    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def talk(first):
            messages = [user(first)]
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages += [answer.choices[0].message, user("6")]

        await asyncio.gather(*(talk(first) for first in "123"))
    return 1.0


def one_beside(base_url, api_key):
    """A long conversation while another call is still sampled."""
    beside = threading.Thread(target=post, args=(base_url, api_key, {"messages": [user("9")]}))
    beside.start()
    messages = [user("1")]
    for _ in range(3):
        status, answer = post(base_url, api_key, {"messages": messages})
        assert status == 200, answer
        messages += [answer["choices"][0]["message"], user("6")]
    beside.join()
    return 1.0


def unread(base_url, api_key):
    """A call whose client leaves while its turn is sampled."""
    port, asked = port_and_request(base_url, api_key, "9")
    with socket.create_connection(("127.0.0.1", int(port))) as client:
        client.sendall(asked.encode())
        post(base_url, api_key, {"messages": [user("1")]})
    post(base_url, api_key, {"messages": [user("2")]})
    return 1.0


def too_long(base_url, api_key):
    """A call without room, alone and as a continuation, between others."""
    messages = [user("1")]
    messages.append(post(base_url, api_key, {"messages": messages})[1]["choices"][0]["message"])
    found = []
    for longer in ([user("1" * 100)], [*messages, user("2" * 100)], [*messages, user("3")]):
        status, answer = post(base_url, api_key, {"messages": longer})
        found.append((status, answer.get("error", {}).get("code")))
    assert found == [(400, "context_length_exceeded")] * 2 + [(200, None)], found
    return 1.0


def nothing(base_url, api_key, item):
    """The task grades the last answer."""
    post(base_url, api_key, {"messages": [user(item.question)]})


def own_words(base_url, api_key, item):
    nothing(base_url, api_key, item)
    return item.answer


def until_refused(base_url, api_key, item):
    """As many turns as there are."""
    messages, turns = [user(item.question)], 0
    while True:
        status, answer = post(base_url, api_key, {"messages": messages})
        if status != 200:
            again = post(base_url, api_key, {"messages": messages})[1]
            assert again == answer and status == 400
            code = answer["error"]["code"]
            return Grade(float(turns), {"by_turns": code == "turn_limit"})
        messages += [answer["choices"][0]["message"], user("12")]
        turns += 1


def refusals(base_url, api_key):
    """Everything that is answered by an error; the sentences are written to a file."""
    good = {"messages": [user("1")]}
    asked = [
        {**good, "n": 2},
        {**good, "temperature": 0.3},
        {**good, "top_p": 0.5},
        {**good, "stop": ["\n"]},
        {**good, "logprobs": True},
        {**good, "max_tokens": 0},
        {**good, "seed": 3},
        {**good, "tool_choice": "required"},
        {"messages": []},
        {"messages": "1"},
        {"messages": [{"role": "robot", "content": "1"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        [1],
    ]
    found = [post(base_url, api_key, body) for body in asked]
    found.append(post(base_url, api_key, None, raw=b'{"messages": [{"role'))
    found.append(post(base_url, api_key, None, raw=b"[" * 100_000))
    found.append(post(base_url, "another", good))
    found.append(post(f"{base_url}/nothing", api_key, good))
    assert all(answer["error"]["message"] for _, answer in found)
    post(base_url, api_key, good)
    return 1.0, {f"{i}": status for i, (status, _) in enumerate(found)}


def hangs(base_url, api_key, item):
    """Calls once, and then does nothing more."""
    nothing(base_url, api_key, item)
    time.sleep(1000)


def never_calls():
    time.sleep(1000)


CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as client:
    client.sendall(sys.argv[2].encode())
    print("sent", flush=True)
    client.recv(1)
    input()
"""


def port_and_request(base_url, api_key, text, length=None):
    """What a client of its own writes; `length`: of the body, where it promises another."""
    body = json.dumps({"messages": [user(text)]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {api_key}\r\n"
    port = base_url.removesuffix("/v1").split(":")[-1]
    return port, f"{head}Content-Length: {length or len(body)}\r\n\r\n{body}"


def leaves(base_url, api_key):
    """The client is killed while its call is open, and nobody comes back."""
    asked = port_and_request(base_url, api_key, "1")
    client = subprocess.Popen(
        [sys.executable, "-S", "-c", CLIENT, *asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout.readline() == b"sent\n"
    client.kill()
    client.wait()
    time.sleep(1000)


def gives_up(base_url, api_key, item):
    """A first call whose client leaves at once, then an ordinary one."""
    port, asked = port_and_request(base_url, api_key, "9")
    with socket.create_connection(("127.0.0.1", int(port))) as client:
        client.sendall(asked.encode())
    return plain(base_url, api_key, item, turns=2)


def half_a_body(base_url, api_key, item):
    """A client that promises more than it sends and waits, beside one that works."""
    port, asked = port_and_request(base_url, api_key, "9", length=1000)
    with socket.create_connection(("127.0.0.1", int(port))) as client:
        client.sendall(asked.encode())
        return plain(base_url, api_key, item, turns=1)


def moody(base_url, api_key, item):
    """By its problem: one of those that fail, or the plain loop."""
    index = int(item.prompt_id.rsplit("/", 1)[-1])
    if index == 1:
        leaves(base_url, api_key)
    return {2: hangs, 3: raises}.get(index, plain)(base_url, api_key, item)


def too_late(base_url, api_key, item):
    """A thread of the program calls on after the program has returned."""

    def call_on():
        with contextlib.suppress(Exception):
            while post(base_url, api_key, {"messages": [user("7")]})[0] != 410:
                pass

    nothing(base_url, api_key, item)
    threading.Thread(target=call_on).start()
    return 1.0


def raises(base_url, api_key, item):
    nothing(base_url, api_key, item)
    raise KeyError("what the program missed")


def garbage(base_url, api_key):
    """A client that sends what is no JSON and does not look at the answer."""
    for _ in range(3):
        post(base_url, api_key, None, raw=b"\x00\xffnothing")


def exits(base_url, api_key, item):
    nothing(base_url, api_key, item)
    sys.exit(3)


def rewards_turns(base_url, api_key, item):
    nothing(base_url, api_key, item)
    return Grade(1.0, {}, (1.0,))


def rewards_tokens(base_url, api_key, item):
    nothing(base_url, api_key, item)
    return [0.0, 1.0]


def tools(base_url, api_key, item):
    """A tool is called, answered and told of; a call that cannot be read is text."""
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    schema = [{"type": "function", "function": function}]
    messages, seen = [user(item.question)], []
    for _ in range(3):
        status, answer = post(base_url, api_key, {"messages": messages, "tools": schema})
        assert status == 200, answer
        choice = answer["choices"][0]
        said = choice["message"]
        seen.append(choice["finish_reason"])
        messages.append(said)
        for call in said.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            total = str(sum(arguments.values()))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": total})
        if not said.get("tool_calls"):
            messages.append(user("Go on."))
    return 1.0, {"calls": seen.count("tool_calls"), "stops": seen.count("stop")}


def wants(base_url, answer_key):
    """Asks for what no program is given."""
