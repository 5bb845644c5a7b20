"""Messages to a process of the own node, and to another one once that has died."""

import pytest
import ray
from timing import wait_until

from rlcore.cluster.delivery import NodeOutlet


def receiver():
    """An actor class; a local one, which Ray sends whole."""

    class Receiver:
        """Keeps messages; one that holds "die" ends the process before it is taken."""

        def __init__(self):
            self.taken = []

        def take(self, message):
            if "die" in message and ray.get_runtime_context().get_actor_name():
                ray.actor.exit_actor()
            if "refuse" in message:
                raise ValueError("refused")
            self.taken.append(message)

        def all(self):
            return self.taken

    return ray.remote(Receiver)


@pytest.fixture(scope="module")
def ray_here():
    ray.init("local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.cluster
def test_what_a_dead_process_did_not_take_goes_to_the_other(ray_here):
    actor = receiver()
    far = actor.remote()
    outlet = NodeOutlet("take", "near", far)
    outlet(["before there is one"])
    wait_until(lambda: ray.get(far.all.remote()) == [["before there is one"]], 60)
    near = actor.options(name="near").remote()
    # it is looked for now and then
    wait_until(lambda: outlet(["near"]) or ["near"] in ray.get(near.all.remote()), 60)
    outlet(["refuse"])  # is the receiver's to report, and is not sent again
    outlet(["die"])
    wait_until(lambda: outlet([]) or ["die"] in ray.get(far.all.remote()), 60)
    outlet(["after"])
    wait_until(lambda: ["after"] in ray.get(far.all.remote()), 60)
    assert ["refuse"] not in ray.get(far.all.remote())
