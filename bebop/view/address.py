"""Where the viewer listens: apart from the server, so that a link to it needs no server."""

HOST, PORT = "127.0.0.1", 8710  # the first port that is tried
