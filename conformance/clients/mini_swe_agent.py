"""Runs `mini-swe-agent`, a coding agent, with its own instructions and shell, in an empty directory."""

import os
import tempfile
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prevents downloads
os.environ["MSWEA_SILENT_STARTUP"] = "1"

import minisweagent
import yaml
from calculator import MODEL, done, questions
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

settings = yaml.safe_load((Path(minisweagent.__file__).parent / "config/mini.yaml").read_text())
limits = {"max_tokens": 96}
model = LitellmModel(model_name=f"openai/{MODEL}", model_kwargs=limits, cost_tracking="ignore_errors")
answer = ""
for question in questions():
    with tempfile.TemporaryDirectory() as directory:
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=directory, timeout=10),
            system_template=settings["agent"]["system_template"],
            instance_template=settings["agent"]["instance_template"],
            step_limit=4,
        )
        answer = str(agent.run(f"Print the result of this with the shell: {question}"))
done(answer[:200])
