"""The web viewer: pages that the gateway makes itself, without a build step or anybody's server."""
