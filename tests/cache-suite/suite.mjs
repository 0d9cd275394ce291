// Runs the suite's tests, and the corrected form of those that have one, with the suite's own client, and prints the
// outcomes as JSON. As the suite's cli.mjs, which knows only what is in the package.
// usage: node suite.mjs BASE-URL [--dump] [TEST...]     no test: all of them; --dump shows requests and responses

import fetch from 'node-fetch'
import { getResults, runTests } from 'http-cache-tests/client/runner.mjs'
import index from 'http-cache-tests/tests/index.mjs'
import surrogate from 'http-cache-tests/tests/surrogate-control.mjs'

import { corrected } from './corrections.mjs'

const [base, ...rest] = process.argv.slice(2)
const dump = rest[0] === '--dump'
const ids = new Set(dump ? rest.slice(1) : rest)
let suites = [...index, surrogate].flatMap(suite => [suite, { ...suite, tests: corrected(suite.tests) }])
if (ids.size > 0) suites = suites.map(suite => ({ ...suite, tests: suite.tests.filter(test => ids.has(test.id)) }))
for (const test of suites.flatMap(suite => suite.tests)) test.dump = dump
await runTests(suites, fetch, false, base)
console.log(JSON.stringify(getResults(), null, 2))
