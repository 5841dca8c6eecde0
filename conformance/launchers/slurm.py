"""Slurm as packaged by Debian, with munge: a controller and two nodes."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from .processes import MARK, Programs, free_port, processes, said, wait

CONF = """
ClusterName=check
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A job that is put back may begin again as soon as its credential is over.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
SlurmdTimeout=20
KillWait=30
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


class Slurm:
    """A cluster of one controller and the nodes n1 and n2 on this host."""

    needs = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
    logs = ("slurm.log",)

    def __init__(self, directory: Path, mark: str) -> None:
        self.folder, self.mark = directory / "slurm", mark
        self.programs = Programs(self.folder)
        self.conf = self.folder / "slurm.conf"
        self.variables = {"SLURM_CONF": str(self.conf), MARK: mark}

    def start(self) -> None:
        (self.folder / "state").mkdir()
        for node in ("n1", "n2"):
            (self.folder / f"spool.{node}").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        first = free_port()
        while not all(_is_free(port) for port in (first, first + 1)):
            first = free_port()
        text = CONF.format(
            host=socket.gethostname(),
            folder=self.folder,
            controller=free_port(),
            node=free_port(),
            first=first,
            second=first + 1,
        )
        self.conf.write_text(text)
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket"]
        files = [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
        self.programs.start("munged", [*munged, *files], **self.variables)
        wait("munged", (self.folder / "munge.socket").exists, 20)
        self.controller("-c")
        for node in ("n1", "n2"):
            self.node(node)
        wait("two idle nodes", lambda: self._nodes().count("idle") == 2, 60)

    def controller(self, *flags: str) -> None:
        command = ["slurmctld", "-D", "-f", str(self.conf), *flags]
        self.programs.start("slurmctld", command, **self.variables)

    def node(self, name: str) -> None:
        self.programs.start(name, ["slurmd", "-D", "-f", str(self.conf), "-N", name], **self.variables)

    def _nodes(self) -> str:
        return said("sinfo", "-h", "-N", "-p", "main", "-o", "%T", **self.variables) if self._answers() else ""

    def _answers(self) -> bool:
        ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, env=os.environ | self.variables)
        return "UP" in ping.stdout

    def options(self) -> list[str]:
        return ["--sbatch", "partition=main", "--sbatch", "mem=1500"]

    def job(self) -> str:
        """Returns the number of the job in the default partition."""
        return said("squeue", "-h", "-p", "main", "-o", "%A", **self.variables).split()[0]

    def state(self) -> str:
        return said("squeue", "-h", "-p", "main", "-o", "%T", **self.variables).strip()

    def requeue(self) -> None:
        """Requeues the job manually."""
        said("scontrol", "requeue", self.job(), **self.variables)

    def preempt(self) -> None:
        """Lets a job with higher priority take both nodes for some seconds."""
        script = self.folder / "urgent.sh"
        script.write_text("#!/bin/sh\nsleep 5\n")
        command = ["sbatch", "-p", "urgent", "-N2", "--exclusive", "--mem=1500", f"--output={self.folder}/urgent.log"]
        said(*command, str(script), **self.variables)
        wait("the urgent job to run", lambda: "RUNNING" in self._urgent(), 120)
        wait("the urgent job to end", lambda: not self._urgent(), 60)

    def _urgent(self) -> str:
        return said("squeue", "-h", "-p", "urgent", "-o", "%T", **self.variables).strip()

    def lose_node(self) -> None:
        """Kills the second node with all its processes, and restarts it after some seconds."""
        daemon = self.programs.running["n2"].pid
        gone = [one for one in processes() if one.variable("SLURMD_NODENAME") == "n2"]
        above = {one.parent for one in gone}
        gone += [one for one in processes() if one.pid in above and "slurmstepd" in one.command]
        self.programs.kill("n2")
        for one in gone:
            one.kill()
        print(f"      killed slurmd ({daemon}) and {len(gone)} processes of n2", flush=True)
        time.sleep(5)
        self.node("n2")

    def restart_controller(self) -> None:
        """Stops the controller for some seconds."""
        self.programs.kill("slurmctld")
        time.sleep(10)
        self.controller()
        wait("the controller", self._answers, 60)

    @property
    def kills(self) -> dict:
        return {
            "requeue": self.requeue,
            "preempt": self.preempt,
            "node": self.lose_node,
            "controller": self.restart_controller,
        }

    def stop(self) -> None:
        self.programs.stop()
        shutil.rmtree(self.folder / "state", ignore_errors=True)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
