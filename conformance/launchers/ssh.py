"""Two hosts in network namespaces, each with its own sshd."""

import shutil
import subprocess
import time
from pathlib import Path

from .processes import MARK, Programs, processes, said, wait

BRIDGE = "levade-br"
NET = "10.213.77"
SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""


class Ssh:
    """Hosts 1 and 2 of a separate network, in which this host is 254."""

    needs = ("ssh", "/usr/sbin/sshd", "ip", "ssh-keygen")
    logs = ()

    def __init__(self, directory: Path, mark: str) -> None:
        self.folder, self.variables = directory / "ssh", {MARK: mark}
        self.programs = Programs(self.folder)
        self.hosts = {f"levade-{number}": f"{NET}.{number}" for number in (1, 2)}

    def start(self) -> None:
        for key in ("host", "user"):
            said("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        # The directory into which sshd locks its children.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        said("ip", "link", "add", BRIDGE, "type", "bridge")
        said("ip", "address", "add", f"{NET}.254/24", "dev", BRIDGE)
        said("ip", "link", "set", BRIDGE, "up")
        for number, (name, address) in enumerate(self.hosts.items(), 1):
            end = f"levade-v{number}"
            said("ip", "netns", "add", name)
            said("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            said("ip", "link", "set", end, "master", BRIDGE, "up")
            inside = ("ip", "-n", name)
            said(*inside, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                said(*inside, "link", "set", device, "up")
            (self.folder / f"{name}.conf").write_text(SSHD.format(address=address, folder=self.folder))
            self.host(name)

    def host(self, name: str) -> None:
        """Starts a host's sshd. A restarted host gets a new one."""
        sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / f"{name}.conf")]
        self.programs.start(name, ["ip", "netns", "exec", name, *sshd], **self.variables)
        wait(f"sshd of {name}", lambda: self._answers(name), 30)

    def _ssh_args(self) -> list[str]:
        known = f"UserKnownHostsFile={self.folder}/known"
        options = ["-i", str(self.folder / "user"), "-F", "none", "-o", known, "-o", "StrictHostKeyChecking=accept-new"]
        return [*options, "-o", "IdentitiesOnly=yes"]

    def _answers(self, name: str) -> bool:
        words = ["ssh", "-o", "BatchMode=yes", *self._ssh_args(), f"root@{self.hosts[name]}", "true"]
        return subprocess.run(words, capture_output=True, timeout=30).returncode == 0

    def options(self) -> list[str]:
        hosts = [word for address in self.hosts.values() for word in ("--host", f"root@{address}")]
        return hosts + [f"--ssh-arg={word}" for word in self._ssh_args()]

    def break_line(self) -> None:
        """Kills the local ssh process that runs the second host's part."""
        for one in processes():
            if one.words[0] == "ssh" and f"root@{NET}.2" in one.words:
                one.kill()

    def lose_host(self) -> None:
        """Kills all processes of the second host, and restarts it after some seconds."""
        name = "levade-2"
        for pid in said("ip", "netns", "pids", name).split():
            for one in processes():
                if one.pid == int(pid):
                    one.kill()
        self.programs.running.pop(name).wait(10)
        time.sleep(5)
        self.host(name)

    def cut_off(self) -> None:
        """Disconnects the second host's network for a minute."""
        said("ip", "link", "set", "levade-v2", "down")
        time.sleep(60)
        said("ip", "link", "set", "levade-v2", "up")

    @property
    def kills(self) -> dict:
        return {"line": self.break_line, "host": self.lose_host, "cable": self.cut_off}

    def stop(self) -> None:
        self.programs.stop()
        for name in self.hosts:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)
        shutil.rmtree(self.folder / "user", ignore_errors=True)
