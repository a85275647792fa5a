"""A process that is forked when all is imported and no test has run yet: what a test has it do
begins within a moment, where a new Python would import the libraries for seconds."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time

from fork_server import fork


class Spare:
    """It ends unused when this process does. Has what the tests use of subprocess.Popen."""

    def __init__(self, function):
        theirs, self.end = os.pipe()
        self.returncode, self.pid = None, fork(be_spare, function, theirs, self.end)
        os.close(theirs)

    def start(self, argv, stdout, stderr):
        """Have it call the function with this sys.argv, and write to these files."""
        command = [[str(arg) for arg in argv], str(stdout), str(stderr)]
        os.write(self.end, json.dumps(command).encode())
        os.close(self.end)
        return self

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=float("inf")):
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("spare process", timeout)
            time.sleep(0.01)
        return self.returncode

    def terminate(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def be_spare(function, command, end):
    """Wait for start() and call the function; what it returns is the exit code."""
    os.close(end)  # else it would not hear the end
    with open(command, "rb") as file:
        command = file.read()
    if not command:
        os._exit(0)  # without what pytest had not flushed
    sys.argv, *paths = json.loads(command)
    for fd, path in enumerate([os.devnull, *paths]):  # pytest has its own
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), fd)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", 1)  # noqa: SIM115
    faulthandler.enable()
    return function()
