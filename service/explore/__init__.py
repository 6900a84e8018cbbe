"""One person's photographs on one page: `mlcd explore`. Opened by `mlcd.service.resources`."""
