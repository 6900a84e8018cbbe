"""The health check of the images: `python ready.py PORT PATH` succeeds where the server in this
container answers that it is ready.
"""

import sys
from http.client import HTTPConnection

connection = HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=4)
connection.request("GET", sys.argv[2])
sys.exit(connection.getresponse().status != 200)
