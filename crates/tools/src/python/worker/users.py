"""The worker of simulated users: classes that answer the messages of an agent.

A class of verl's interactions has `generate_response`; one object of it serves all attempts, each under its own
name. Any other class has `respond`; each attempt has an object of it."""

import asyncio
import inspect
import os

from levade_worker import answers, load, schema, server, shims, tools


class Speaker:
    """A class with `respond`, of which each attempt has an object."""

    opens = True

    def __init__(self, name, kind, options):
        self.name, self.box, self.options = name, tools.Box(kind, name), options

    async def start(self, _session, row, run):
        return await run(lambda: self.box.make(dict(self.options), row), False)

    async def respond(self, user, messages, _row, run):
        found = await run(lambda: user.respond(messages), inspect.iscoroutinefunction(user.respond))
        if found is not None and not isinstance(found, str):
            raise schema.Unusable(f"{self.name}.respond gave {found!r}, but must give a text, or None to end")
        return {"text": found, "ends": found is None}

    async def finish(self, user, _row, run):
        return await self.box.evaluate(user, None, run)

    async def close(self, user, _row, run):
        await self.box.close(user, None, run)


class Interaction:
    """A class with verl's interface of interactions. Its object knows attempts by their names."""

    opens = False

    def __init__(self, name, kind, config):
        self.name, self.one = name, kind(dict(config))

    async def start(self, session, row, run):
        begin = self.one.start_interaction
        given = self.given(row, begin)
        made = await run(lambda: begin(session, **given), inspect.iscoroutinefunction(begin))
        return session if made is None else made

    async def respond(self, user, messages, row, run):
        reply = self.one.generate_response
        given = self.given(row, reply)
        found = await run(lambda: reply(user, messages, **given), inspect.iscoroutinefunction(reply))
        if not isinstance(found, tuple) or len(found) != 4 or not isinstance(found[1], str):
            raise schema.Unusable(
                f"{self.name}.generate_response gave {found!r}, but must give (ends, text, score, metrics)"
            )
        ends, text, score, _ = found
        return {"text": text, "ends": bool(ends), "score": None if score is None else answers.number(score)}

    async def finish(self, user, row, run):
        return await self.called("calculate_score", user, row, run)

    async def close(self, user, row, run):
        await self.called("finalize_interaction", user, row, run)

    async def called(self, name, user, row, run):
        """Calls a method, which takes the name of the attempt or nothing."""
        method = getattr(self.one, name, None)
        if method is None:
            return None
        parameters = inspect.signature(method).parameters.values()
        kinds = {p.kind for p in parameters}
        given = self.given(row, method) if inspect.Parameter.VAR_KEYWORD in kinds else {}
        takes = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
        positional = (user,) if takes else ()
        return await run(lambda: method(*positional, **given), inspect.iscoroutinefunction(method))

    @staticmethod
    def given(row, method):
        """The arguments that the row has for a method of its interaction. As in verl, the name of the interaction is
        one of them; a method that does not take it runs, too."""
        extra = row.get("extra_info")
        found = extra.get("interaction_kwargs") if isinstance(extra, dict) else None
        parameters = inspect.signature(method).parameters.values()
        takes_name = any(p.name == "name" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        return {key: value for key, value in (found or {}).items() if key != "name" or takes_name}


def is_interaction(value):
    return (
        inspect.isclass(value)
        and callable(getattr(value, "generate_response", None))
        and value is not shims.BaseInteraction
    )


def is_user(value):
    return inspect.isclass(value) and (is_interaction(value) or callable(getattr(value, "respond", None)))


def made(name, kind, options):
    try:
        return (Interaction if is_interaction(kind) else Speaker)(name, kind, options)
    except Exception as error:
        raise load.Fault(f"{name} cannot be a user: {type(error).__name__}: {error}") from error


def of_file(file, name, options):
    """The user that a file has, or the one of this name."""
    module = load.run(os.path.abspath(file))
    own = {
        key: value
        for key, value in vars(module).items()
        if is_user(value) and value.__module__ == module.__name__
    }
    if name and name not in own:
        raise load.Fault(
            f"`class` names {name!r}, which is no class of {os.path.basename(file)} with `respond` or "
            f"`generate_response`; there is {', '.join(own) or 'none'}"
        )
    last = [name] if name else [
        key
        for key, value in own.items()
        if not any(other is not value and issubclass(other, value) for other in own.values())
    ]
    if len(last) != 1:
        raise load.Fault(
            f"{os.path.basename(file)} has {len(last)} classes with `respond` or `generate_response`"
            f"{': ' + ', '.join(last) if last else ''}; name the user in `class`"
        )
    return {last[0]: made(last[0], own[last[0]], options)}


def of_config(config, name):
    """The users of a configuration of verl, by name, or the one of this name."""
    folder = os.path.dirname(os.path.abspath(config))
    contents = load.read(config)
    listed = contents.get("interaction") if isinstance(contents, dict) else None
    if not isinstance(listed, list) or not listed:
        raise load.Fault(f"{os.path.basename(config)} has no list `interaction`")
    found = {}
    for at, entry in enumerate(listed):
        where = f"interaction[{at}] of {os.path.basename(config)}"
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise load.Fault(f"{where} has no `class_name`")
        kind = load.imported(entry["class_name"], where, folder)
        if not is_interaction(kind):
            raise load.Fault(f"{where}: {entry['class_name']} has no method `generate_response`")
        own = str(entry.get("name") or kind.__name__.replace("Interaction", "").lower())
        found[own] = made(own, kind, {"name": own, **(entry.get("config") or {})})
    if name and name not in found:
        raise load.Fault(f"`class` names {name!r}, but {os.path.basename(config)} has {', '.join(found)}")
    return {name: found[name]} if name else found


class Server(server.Server):
    """Answers orders about users. A session is the user of an attempt."""

    def __init__(self, users, line, folder):
        super().__init__({}, line, folder)
        self.users = users

    def chosen(self, row):
        extra = row.get("extra_info")
        given = extra.get("interaction_kwargs") if isinstance(extra, dict) else None
        name = given.get("name") if isinstance(given, dict) else None
        if len(self.users) == 1 and (name is None or name not in self.users):
            return next(iter(self.users.values()))
        if name not in self.users:
            raise schema.Unusable(
                f"extra_info.interaction_kwargs.name of the row is {name!r}, but must be one of "
                f"{', '.join(self.users)}"
            )
        return self.users[name]

    async def open(self, order):
        row = order["task"].get("row") or {}
        user = self.chosen(row)
        if order["opens"] and not user.opens:
            raise schema.Unusable(f"{user.name} answers messages and opens no conversation: set `opens = false`")
        begun = await user.start(order["session"], row, server.run)
        self.sessions[order["session"]] = (user, begun, row)
        return {}

    async def respond(self, order):
        user, begun, row = self.session(order)
        found = await user.respond(begun, order["messages"], row, server.run)
        return {**found, "text": schema.sound(found["text"]) if found["text"] is not None else None}

    async def finish(self, order):
        user, begun, row = self.session(order)
        score = await user.finish(begun, row, server.run)
        return {"score": None if score is None else answers.number(score)}

    async def close(self, order):
        found = self.sessions.pop(order["session"], None)
        if found is not None:
            user, begun, row = found
            await user.close(begun, row, server.run)
        return {}

    def session(self, order):
        found = self.sessions.get(order["session"])
        if found is None:
            raise schema.Unusable("its user is gone")
        return found


def main(first, line):
    """Serves the users that the first line names, until there are no more orders."""
    place = first.get("file") or first.get("config")
    folder = load.prepare(place)
    name = first.get("class") or ""
    try:
        users = (
            of_file(first["file"], name, first["options"]) if first.get("file") else of_config(first["config"], name)
        )
    except load.Fault as fault:
        return line.failed(answers.sound(fault))
    line.parse = schema.order
    line.ready({})
    asyncio.run(server.serve(Server(users, line, folder)))
    os._exit(0)
