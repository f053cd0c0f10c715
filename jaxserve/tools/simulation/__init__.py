"""The real engine on a virtual clock: scheduler, pages and loop are those that serve; only the device is a formula."""
