"""Web viewer: HTML pages that the gateway renders itself, without a build step or other servers."""
