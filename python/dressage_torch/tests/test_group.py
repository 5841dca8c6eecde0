"""Where processes of a group listen."""

import socket

from dressage_torch.group import interface_towards


def test_this_machine_is_reached_by_its_loopback():
    assert interface_towards("127.0.0.1") in {name for _, name in socket.if_nameindex()}


def test_an_address_that_is_none_leads_nowhere():
    assert interface_towards("no.such.host.invalid") is None
