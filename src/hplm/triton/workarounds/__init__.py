"""Workarounds for Triton 24.10 (server version 2.51): one module for each behaviour, named after the behaviour.

A module's docstring says what Triton does, and how the workaround is switched off. It names releases if others than 24.10
have the behaviour, or if a release changes it. A fix is detected
while Triton runs if that is possible; otherwise the server's version decides (`releases`). "Harmless" means that the
workaround changes nothing on a Triton that has the fix.

    module                behaviour                                                 mended in    switched off
    kept_requests         keeps requests of a bounded queue until another comes     none seen    when no-op requests run
    dead_stubs            does not restart a stub that died                         none seen    when a new stub is found
    surviving_stubs       stubs of a killed server may live on                      none seen    harmless
    killed_server_files   a killed server leaves files in /dev/shm                  26.09 partly harmless
    hung_crash            a crashed server may hang and say that it is ready        none seen    harmless
    idle_connections      waits for idle clients before it ends                     none seen    harmless
    late_finalize         tells stubs of its end only when no request is running    none seen    harmless
    finished_requests     crashes if asked about a finished request                 none seen    harmless
    full_shared_memory    fails all answers of a call if one has no room            none seen    harmless
    shell_paths           passes paths to a shell without quotes                    none seen    always on
    deep_json             overflows its stack on nested JSON or chopped bodies      26.05        by version
    empty_outputs         numpy 2 makes every output tensor empty                   24.11        by version

Three workarounds are where they act. `hplm.triton.launcher.restricted_apis` hides a secret that Triton takes as an argument.
The other two are in rooms that do not import this one: `hplm.serving.triton_queue_time` (Triton does not report queue time),
and `hplm_client.transport.connection` (a cancelled gRPC request may crash Triton before 24.12).
"""
