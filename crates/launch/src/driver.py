"""The driver of a job of Ray: holds a machine for each part of a run, and starts each part again that dies.

Each part runs under a supervisor, whose line its machine's actor holds: nothing outlives the job.
"""

import json
import os
import subprocess
import sys
import time

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

JOB = json.loads(sys.argv[1])
RESOURCES = {"CPU": JOB["processors"], **({"GPU": JOB["gpus"]} if JOB["gpus"] else {})}
# Longest wait for a machine, in seconds.
PATIENCE = 600
# Ray ends the children of an actor at once, with kill -9, so that the supervisor must not be one of them.
SUPERVISOR = '"$0" keep; exit $?'


@ray.remote(max_restarts=0)
class Machine:
    """One machine of the run."""

    def run(self, node):
        """Runs its part, and gives its exit code."""
        order = {"command": ["sh", JOB["script"], str(node)], "folder": JOB["root"], "input": None}
        with open(f"{JOB['folder']}/node-{node}.log", "ab") as log:
            supervisor = subprocess.Popen(
                ["sh", "-c", SUPERVISOR, JOB["binary"]],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "LEVADE_HEAD": ray.util.get_node_ip_address()},
                start_new_session=True,
            )
        # The supervisor ends its part when this process is gone, and so the other end of this line.
        supervisor.stdin.write(json.dumps(order).encode() + b"\n")
        supervisor.stdin.flush()
        code = supervisor.wait()
        return 128 - code if code < 0 else code


class Part:
    """A machine's part under way, after it has died so often in a row."""

    def __init__(self, group, node, died):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        gpus = JOB["gpus"]
        options = {"num_cpus": JOB["processors"], "num_gpus": gpus, "scheduling_strategy": strategy}
        self.machine = Machine.options(**options).remote()
        self.placed = self.machine.__ray_ready__.remote()
        self.running = self.machine.run.remote(node)
        self.since, self.died = time.monotonic(), died

    def ended(self):
        """Exit code, or why there is none; `None` while it runs."""
        if not ray.wait([self.running], timeout=0)[0]:
            if not ray.wait([self.placed], timeout=0)[0] and time.monotonic() - self.since > PATIENCE:
                sys.exit(f"waited {PATIENCE} s for a machine with {RESOURCES}: {ray.nodes()}")
            return None
        try:
            return ray.get(self.running)
        except RayError as error:
            return str(error).strip().splitlines()[0]


def main():
    ray.init(address="auto")
    group = placement_group([RESOURCES] * JOB["nodes"], strategy="SPREAD")
    if not group.wait(PATIENCE):
        sys.exit(
            f"waited {PATIENCE} s for {JOB['nodes']} machines with {RESOURCES}: the cluster has {ray.cluster_resources()}"
        )
    parts = {node: Part(group, node, 0) for node in range(JOB["nodes"])}
    while True:
        ray.wait([part.running for part in parts.values()], timeout=2)
        for node, part in list(parts.items()):
            code = part.ended()
            if code is None:
                continue
            if node == 0 and code in (0, 2, 130):
                return code, [part.running for part in parts.values()]
            if code == 0:
                del parts[node]
                continue
            fresh = time.monotonic() - part.since > JOB["fresh"]
            died = 1 if fresh else part.died + 1
            print(f"machine {node} ended ({code}), {died} times in a row", flush=True)
            if died > JOB["restarts"] or code == 2:
                return 2 if code == 2 else 1, []
            ray.kill(part.machine)
            parts[node] = Part(group, node, died)
            # Others may have taken its end for that of the run.
            for other in set(range(JOB["nodes"])) - set(parts) if node == 0 else ():
                parts[other] = Part(group, other, 0)


code, others = main()
# The others have been told by the first; where that could not tell, they end with this job.
if code == 0:
    ray.wait(others, num_returns=len(others), timeout=60)
print("exit code", code, flush=True)
sys.exit(code)
