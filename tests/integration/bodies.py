"""How images are sent."""

import base64


def data_uri(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def files(*images):
    return [("files", (f"{i}.png", image, "image/png")) for i, image in enumerate(images)]
