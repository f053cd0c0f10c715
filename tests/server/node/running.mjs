// What the suites of all clients share.
import assert from "node:assert/strict";

export async function countRunning(root) {
  const text = await (await fetch(`${root}/metrics`)).text();
  return Number(text.match(/^jaxserve:num_requests_running\S* (\S+)$/m)[1]);
}

export async function waitUntilIdle(root) {
  for (let turn = 0; turn < 400; turn += 1) {
    if ((await countRunning(root)) === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  assert.fail("a row is still taken");
}

// Runs the tests by name, prints "ok NAME" or "not ok NAME: REASON" for each, and ends the process.
export async function runSuite(tests) {
  let failed = 0;
  for (const [name, test] of Object.entries(tests)) {
    try {
      await test();
      console.log(`ok ${name}`);
    } catch (error) {
      failed += 1;
      console.log(`not ok ${name}: ${String(error.stack ?? error).replaceAll("\n", " | ")}`);
    }
  }
  console.log(`# ${Object.keys(tests).length} tests, ${failed} failed`);
  process.exit(failed ? 1 : 0);
}
