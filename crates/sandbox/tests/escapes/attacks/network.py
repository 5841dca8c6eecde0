### refused: tcp
tries(does, socket.create_connection, ("127.0.0.1", @port@), 2)
### refused: tcp over IPv6
tries(lambda: does(socket.socket(socket.AF_INET6).connect, ("::1", @port@)))
### refused: udp
tries(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", @port@)))
### refused: listening
tries(lambda: does(socket.socket().bind, ("", 0)))
### refused: raw sockets
tries(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
### refused: packet sockets
tries(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0)
### refused: netlink
tries(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)
### refused: vsock
tries(socket.socket, 40, socket.SOCK_STREAM, 0)
### refused: a local socket of the host
tries(lambda: does(socket.socket(socket.AF_UNIX).connect, "@unix@"))
### refused: an abstract socket of the host
tries(lambda: does(socket.socket(socket.AF_UNIX).connect, "\0@abstract@"))
### refused: names by DNS
tries(socket.gethostbyname, "example.com")
### refused: the network as /proc shows it
tries(lambda: open("/proc/net/tcp").read())
