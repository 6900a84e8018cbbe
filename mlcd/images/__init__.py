"""Images: where they come from, how bytes become pixels, how pixels become what an encoder takes."""
