"""A server of the Model Context Protocol over standard input and output, with all that can go wrong."""

import json
import os
import sys
import time

gone = set()


def send(message: dict) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(value: str, **more) -> dict:
    return {"content": [{"type": "text", "text": value}], **more}


TOOLS = ["count", "echo", "fails", "dies", "hangs", "long", "image", "floods", "changes", "structured", "garbage", "odd", "grows", "works"]
count = 0


def call(name: str, arguments: dict) -> dict | None:
    global count
    if name in gone:
        raise LookupError(f"Unknown tool: {name}")
    if name == "count":
        count += 1
        return text(str(count))
    if name == "echo":
        return text(json.dumps([arguments, os.environ.get("SECRET"), os.environ.get("NAMED")]))
    if name == "fails":
        return text("no such file", isError=True)
    if name == "dies":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hangs":
        time.sleep(3600)
    if name == "long":
        return text("x" * arguments["length"])
    if name == "image":
        return {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}, {"type": "text", "text": "a cat"}]}
    if name == "floods":
        for i in range(20_000):
            send({"method": "notifications/message", "params": {"level": "info", "data": f"line {i}"}})
        return text("done")
    if name == "changes":
        gone.add("fails")
        send({"method": "notifications/tools/list_changed"})
        return text("changed")
    if name == "structured":
        return {"content": [], "structuredContent": {"sum": 3}}
    if name == "garbage":
        print("this is no JSON", flush=True)
        print('{"jsonrpc": "2.0", "id": 12345, "result": {}}', flush=True)
        return text("after garbage")
    if name == "odd":
        # The response is written as it is given, whatever it is, with a pause after its first part.
        if "start" in arguments:
            sys.stdout.buffer.write(arguments["start"].encode("latin-1"))
            sys.stdout.flush()
            time.sleep(2)
        sys.stdout.buffer.write(arguments["line"].encode("latin-1") + arguments.get("end", "\n").encode())
        sys.stdout.flush()
        return None
    if name == "grows":
        TOOLS.append("grown")
        send({"method": "notifications/tools/list_changed"})
        return text("grown is there")
    if name == "grown":
        return text("it grew")
    if name == "works":
        for step in range(arguments["length"]):
            send({"method": "notifications/progress", "params": {"progressToken": arguments["token"], "progress": step}})
            time.sleep(0.5)
        return text("done")
    raise LookupError(f"Unknown tool: {name}")


def page(cursor: str | None) -> dict:
    at = int(cursor or 0)
    schema = {"type": "object", "properties": {"length": {"type": "integer"}}}
    tools = [{"name": name, "description": f"It {name}.", "inputSchema": schema} for name in TOOLS[at : at + 4]]
    # The last page leads to itself, as those of some servers do.
    return {"tools": tools, "nextCursor": str(at + 4 if at + 4 < len(TOOLS) else at)}


for line in sys.stdin:
    message = json.loads(line)
    method, params, identity = message.get("method"), message.get("params", {}), message.get("id")
    if identity is None:
        continue
    if method == "initialize":
        info = {"name": "tests", "version": "1"}
        send({"id": identity, "result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}})
    elif method == "tools/list":
        send({"id": identity, "result": page(params.get("cursor"))})
    elif method == "tools/call":
        try:
            arguments = {**params.get("arguments", {})}
            if params["name"] == "works":
                arguments["token"] = params["_meta"]["progressToken"]
            if params["name"] == "odd":
                arguments["line"] = arguments["line"].replace("ID", str(identity))
            result = call(params["name"], arguments)
            if result is not None:
                send({"id": identity, "result": result})
        except LookupError as error:
            send({"id": identity, "error": {"code": -32602, "message": str(error)}})
    else:
        send({"id": identity, "error": {"code": -32601, "message": f"no method {method}"}})
