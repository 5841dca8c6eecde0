"""Recipes of bits.py, one for each kind of model caller, and the programs that they start."""

import json

# The calculator as the model knows it. With another description, or none, the model rarely writes calls.
DESCRIPTION = "Evaluates an arithmetic expression with + - * / ^ and parentheses."
FORMAT = '<tool_call>\n{"name": "<tool>", "arguments": {"<parameter>": <value>}}\n</tool_call>'
SYSTEM = f"Tools:\ncalculator(expression: string): {DESCRIPTION}\nCall: {FORMAT}"

# Programs that call the chat completions endpoint, one for each mode. They use only the standard library.
AGENT = """
import json, os, sys, time, urllib.request

BASE, KEY, MODEL = (os.environ[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "DESCRIPTION", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": CALCULATOR}]
SYSTEM = TEXT

def post(path, **body):
    head = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(BASE + path, json.dumps({"model": MODEL, **body}).encode(), head)
    with urllib.request.urlopen(request, timeout=100) as response:
        return response.read().decode()

def chat(messages, **options):
    choices = json.loads(post("/chat/completions", messages=messages, **options))["choices"]
    return [choice["message"] for choice in choices]

def user(text, system=None):
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]

def go_on(messages, reply):
    calls = reply.get("tool_calls") or []
    digits = str(len(str(calls))) * 15
    results = [{"role": "tool", "tool_call_id": call["id"], "content": digits} for call in calls]
    return [*messages, reply, *(results or user("3 + 4"))]

mode, question = sys.argv[1:]
history = user(question)
reply = chat(history, tools=TOOLS)[0]
if mode == "forks":
    history = go_on(history, reply)
    choices = chat(history, tools=TOOLS, n=2, max_tokens=2)
    history = go_on(history, choices[1])
    post("/chat/completions", messages=user(question + " + 1") + history[1:], tools=TOOLS, stream=True)
    chat(user(question, system=SYSTEM + " You summarise."), temperature=0.7, top_p=0.9)
    print(post("/messages", messages=user("Say: " + question), max_tokens=60).partition('"content"')[2])
elif mode == "turns":
    for turn in range(5):
        history = go_on(history, reply)
        reply = chat(history, tools=TOOLS)[0]
    print(reply["content"])
elif mode == "opponent":
    rival = chat(user(question, system=SYSTEM + " You oppose."))[0]["content"] or "nothing"
    history = go_on(history, reply)
    print(chat(history + user(rival), tools=TOOLS)[0]["content"], rival)
elif mode == "sleeps":
    time.sleep(1000 * (sum(map(ord, question)) % 3 == 0))
    print(reply["content"])
"""

# A score that differs between most texts, so that every step has a gradient.
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(map(ord, solution_str)) % 11 / 10, "length": len(solution_str) / 100}
"""

# An external scorer program: the fraction of digits.
DIGITS = """
import json, sys
text = json.loads(sys.stdin.readline())["text"]
print(sum(letter.isdigit() for letter in text) / max(len(text), 1))
"""

# A package with gymnasium's interface: an environment of four steps.
WORLD = """
class error:
    Error = DependencyNotInstalled = type("Error", (Exception,), {})

class spaces:
    Discrete, Text = type("Discrete", (), {}), type("Text", (), {})

class World:
    action_space, render_mode, spec = spaces.Text(), None, None

    def reset(self, seed):
        self.at = 0
        return f"{seed % 10} + 2", {}

    def step(self, action):
        self.at += 1
        return f"{len(action)} - {self.at}", sum(map(ord, action)) % 7 / 10, self.at == 4, False, {}

    def close(self):
        pass

def make(name, **config):
    return World()
"""

# A tool that hangs for some expressions, and a tool that replaces an agent while a model learns to call it.
SLOW = """
import sys, time
time.sleep(1000 * (sum(map(ord, sys.argv[1])) % 3 == 0))
print(7)
"""
CLERK = """
def clerk(request: str) -> str:
    "Does sums."
    return "3"
"""


def row(number: int) -> dict:
    """Returns a task with scripted completions. A second agent handles every second task."""
    a, b = number + 3, 7 * number % 40 + 2

    def calls(*arguments: dict, name: str = "calculator") -> list:
        written = [{"tool_calls": [{"function": {"name": name, "arguments": one}}]} for one in arguments]
        return [*written, f"The answer is {a + b}."]

    once = calls({"expression": f"{a} + {b}"})
    return {
        "question": f"{a} + {b}",
        "answer": a + b,
        "once": once,
        "thrice": calls(*({"expression": f"{a} + {step}"} for step in range(3))),
        "helped": once if number % 2 else calls({"request": f"{a} + {b}"}, name="clerk"),
        **({"agent_name": "checker"} if number % 2 else {}),
    }


RUN = 'run = {name = "toy", folder = "run", checkpoint_every = 3}\nengine = {micro_batch_tokens = 600}\n'
MODEL = 'model = {source = "./model"}\n'
ARITHMETIC = '[[tasks]]\nkind = "arithmetic"\noperands = 2\nmin_digits = 1\nmax_digits = 2\nwords = 0.0\ntrain = 500\n'
ROWS = '[[tasks]]\nkind = "file"\npath = "rows.jsonl"\nheld_out = 2\n'
TOOLS = 'tools = ["calculator"]\ntool_prompt = "compact"\nmax_turns = 3\nmax_tokens = 160\n'
REWARD = '[reward]\nmalformed_call = -0.1\nunfinished = -0.2\nscorer = {kind = "python", file = "score.py"}\n'
EXTERNAL = 'kind = "external"\nurl = "http://127.0.0.1:PORT/v1"\nmodel = "toy"\n'
SFT, RL = '[[phase]]\nkind = "sft"\n', '[[phase]]\nkind = "rl"\n'


def recipe(
    agent: str = TOOLS,
    rl: str = "",
    *,
    model: str = MODEL,
    tasks: str = ARITHMETIC,
    reward: str = REWARD,
    more: str = "",
    sft: str = "",
) -> str:
    """Returns a recipe of a few steps. `rl` and `sft` are keys of its phases."""
    parts = [RUN, model, tasks, f"[agent]\n{agent}", reward, "[eval]\ntasks = 2\n", more]
    if sft:
        parts += [SFT, with_defaults(sft, demonstrations=8, batch=4, learning_rate=1e-3)]
    defaults = {"steps": 6, "groups": 2, "group_size": 4, "temperature": 0.8, "learning_rate": 1e-4}
    return "\n".join([*parts, RL, with_defaults(rl, **defaults)])


def with_defaults(keys: str, **defaults: float) -> str:
    """Returns keys with defaults for those that they do not set."""
    named = {line.split(" = ")[0] for line in keys.splitlines()}
    return keys + "".join(f"{name} = {value}\n" for name, value in defaults.items() if name not in named)


def program(mode: str, keys: str = "", seconds: int = 100) -> str:
    """Returns the keys of an agent that is an external program."""
    return (
        f'kind = "program"\ncommand = ["python3", "agent.py", "{mode}", "{{question}}"]\ntool_prompt = "compact"\n'
        f"max_turns = 20\nmax_tokens = 600\nattempt_seconds = {seconds}\n{keys}"
    )


def trained(*names: str) -> str:
    """Returns the tables of trained policies."""
    return "".join(f'[policy.{name}]\nkind = "trained"\n' for name in names)


def context(kind: str, keys: str = "") -> str:
    """Returns the keys of a context policy with a small budget."""
    return f'max_context_tokens = 450\ncontext = {{kind = "{kind}", keep = 1{keys}}}\n'


SUMMARISE = context("summarise", ', tokens = 40, train = true, instruction = "Summarise."')
LONG = TOOLS.replace("max_turns = 3", "max_turns = 8").replace("160", "400")
THRICE = 'source = {field = "thrice", min_score = -9}\nepochs = 20\nlearning_rate = 3e-3\n'
FEW = "steps = 3\ngroups = 1\n"
RECIPES = {
    "calculator": recipe(
        rl="steps = 20\n",
        reward='[reward]\nmalformed_call = -0.1\nscorer = {kind = "numeric", tolerance = '
        '{kind = "within", absolute = 20.0, relative = 0.0}}\n',
    ),
    "two-policies": recipe(
        f'{TOOLS}policy = "solver"\n[agent.checker]\npolicy = "checker"\n',
        tasks=ROWS.replace("rows", "two"),
        more=trained("solver", "checker"),
    ),
    # The program's request sets the sampling parameters of an untrained agent; the recipe's keys do not apply to it.
    "forking-program": recipe(
        program("forks") + "[agent.summariser]\ntrain = false\nsampling = {temperature = 0.7, top_p = 0.9}\n"
        'match = {system = "(?i)summari[sz]e"}\n',
        FEW,
    ),
    "sub-agent": recipe(
        f'{TOOLS.replace("calculator", "clerk")}policy = "asker"\n[agent.clerk]\n{TOOLS}'
        'policy = [{name = "asker", weight = 0.5}, {name = "clerk", weight = 0.5}]\n'
        '[agent.browser]\ntools = []\nmax_tokens = 150\npolicy = "clerk"\n',
        model='model = {source = "./school/checkpoints/step-000032"}\n',
        tasks=ROWS,
        more=trained("asker", "clerk")
        + '[[tool]]\nkind = "agent"\nname = "clerk"\nagent = "clerk"\ndescription = "Does sums."\n'
        '[[tool]]\nkind = "calculator"\ncondense = {agent = "browser", above = 1, instruction = "Shorten."}\n',
    ),
    "teacher": recipe(
        f'{TOOLS}policy = "default"\n',
        tasks=ROWS,
        more=trained("default")
        + f"[policy.teacher]\n{EXTERNAL}{SFT}"
        + with_defaults('source = {field = "once", min_score = 0}\n', demonstrations=8, batch=4, learning_rate=1e-3),
        sft='source = {policy = "teacher", min_score = 0}\n',
    ),
    "summaries": recipe(LONG + SUMMARISE, "steps = 4\n", tasks=ROWS, sft=THRICE),
    "summaries-program": recipe(program("turns", SUMMARISE), FEW),
    "drop-oldest": recipe(LONG + context("drop_oldest"), "steps = 4\n", tasks=ROWS, sft=THRICE),
    "drop-oldest-program": recipe(program("turns", context("drop_oldest")), FEW),
    "truncate-middle": recipe(LONG + context("truncate_middle"), "steps = 4\n", tasks=ROWS, sft=THRICE),
    "truncate-middle-program": recipe(program("turns", context("truncate_middle")), FEW),
    "ppo": recipe(rl='algorithm = "ppo"\ncritic = {learning_rate = 1e-3}\nmini_batches = 2\n'),
    "lora": recipe(
        model='model = {source = "./model", lora = {rank = 4}}\n',
        rl='learning_rate = 1e-3\nkl = {estimator = "k3", coefficient = 0.01}\n',
    ),
    "scorers": recipe(
        reward='[[reward.scorers]]\nname = "right"\nkind = "numeric"\n'
        '[[reward.scorers]]\nname = "python"\nkind = "python"\nfile = "score.py"\nweight = 0.5\n'
        "weights = {length = 0.1}\n"
        '[[reward.scorers]]\nname = "digits"\nkind = "command"\ncommand = ["python3", "digits.py"]\nweight = 0.2\n'
        '[[reward.scorers]]\nname = "judge"\nkind = "judge"\nmax_tokens = 110\nunscored = 0.5\n'
        f"system = {json.dumps(SYSTEM)}\n"
        'endpoints = [{url = "http://127.0.0.1:PORT/v1", model = "toy"}]\ntemplate = "{{ question }} {{ answer }}"\n'
        'verdict = {kind = "pattern", right = "[02468]", wrong = "[13579]"}\n'
    ),
    "environment": recipe(
        f'kind = "environment"\nsystem = {json.dumps(SYSTEM)}\nmax_turns = 6\nmax_tokens = 400\n',
        tasks='[[tasks]]\nkind = "gymnasium"\nenvironment = "World-v0"\ntrain = 40\nheld_out = 2\n',
        reward='[reward]\nscorer = {kind = "environment"}\n',
    ),
    "external-opponent": recipe(
        program("opponent", 'policy = "default"\n') + '[agent.rival]\nmatch = {system = "oppose"}\n'
        'policy = [{name = "default", weight = 0.5}, {name = "opponent", weight = 0.5}]\n',
        FEW,
        more=f"{trained('default')}[policy.opponent]\n{EXTERNAL}",
    ),
    "stale": recipe(rl="staleness = 1\n"),
    "prompt-left": recipe(TOOLS + 'max_prompt_tokens = 225\ntruncation = "left"\n'),
    "prompt-middle": recipe(TOOLS + 'max_prompt_tokens = 225\ntruncation = "middle"\n'),
    # Only sleeping processes may reach these limits. On a loaded machine, 3 and 6 seconds were too short for others.
    "deadline": recipe(program("sleeps", seconds=20), "steps = 1\n").replace("tasks = 2", "tasks = 0"),
    "slow-tool": recipe(
        rl="steps = 2\n",
        more=f'[[tool]]\nkind = "command"\nname = "calculator"\ndescription = "{DESCRIPTION}"\nseconds = 10\n'
        'command = ["python3", "slow.py", "{expression}"]\n'
        'parameters = {properties = {expression = {type = "string"}}, required = ["expression"]}\n',
    ),
}
# Trains the model of `sub-agent`, which calls an agent as a tool, and the calculator.
SCHOOL = (
    'run = {name = "school", folder = "school", checkpoint_every = 0}\neval = {tasks = 0}\n'
    + MODEL
    + ROWS.replace("rows", "two")
    + f"[agent]\n{TOOLS.replace('calculator', 'clerk')}[agent.checker]\n{TOOLS}"
    + f'{REWARD}[[tool]]\nkind = "python"\nname = "clerk"\nfile = "clerk.py"\n{SFT}'
    + 'source = {field = "helped", min_score = -9}\ndemonstrations = 32\nbatch = 8\nepochs = 8\n'
    + "learning_rate = 3e-3\n"
)
FILES = {
    "agent.py": AGENT.replace("DESCRIPTION", DESCRIPTION).replace("TEXT", repr(SYSTEM)),
    "score.py": SCORE,
    "digits.py": DIGITS,
    "slow.py": SLOW,
    "clerk.py": CLERK,
    "gymnasium/__init__.py": WORLD,
    "two.jsonl": "".join(json.dumps(row(number)) + "\n" for number in range(40)),
    "rows.jsonl": "".join(json.dumps(row(number)) + "\n" for number in range(0, 80, 2)),
    "school.toml": SCHOOL,
}
