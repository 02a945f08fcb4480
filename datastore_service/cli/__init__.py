import os

# gRPC reads it when it is imported. By default it writes a line of its own about a failed handshake beside the command's.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
