"""Images by URL: one strict parser, checked addresses, and turns for every host."""
