"""HTTP/1.1 for bodies of objects: connections, TLS, proxies, hedged requests."""
