// Tests of the npm package that their own authors have since corrected: as published there, each asks for what an RFC
// says not to do, or for what no gateway can do. The suite's repository holds the corrected form; no package of it has
// been published. Both forms run: the published one's outcome is in expected.json, the corrected one has to pass.

const REPOSITORY = 'https://github.com/http-tests/cache-tests/commit/'

const AGE = {
  commit: `${REPOSITORY}c4cc737c5b5c50860bf95fe198c0d297e048a663`,
  reason: 'RFC 9111 §5.1: of an Age with several members the first SHOULD be used. The package wants the response to be stale.'
}
const INVALID_AGE = {
  commit: `${REPOSITORY}7498c4dc15f9aa2626b7a5d3778f3c0bfbfa33bc`,
  reason: 'RFC 9111 §5.1: an Age that is no number of seconds SHOULD be ignored. The package wants the response to be stale.'
}
const CLOSED = {
  commit: `${REPOSITORY}80d855f`,
  reason: 'The origin closes the connection without an answer, and the package wants a response that carries the ' +
    "origin's Server-Request-Count for that request: no gateway can have it (RFC 9110 §15.6.3 asks for 502)."
}

// The response is fresh, and so comes from the cache.
const fresh = test => [test.requests[0], { expected_type: 'cached' }]

const twoLines = test => {
  const [first, ...rest] = fresh(test)
  const others = first.response_headers.filter(([name]) => name !== 'Age')
  return [{ ...first, response_headers: [...others, ['Age', '3600', false], ['Age', '3600', false]] }, ...rest]
}

// Whatever answers, it is not the stored response.
const notStored = test => [
  test.requests[0],
  {
    disconnect: true,
    expected_status: 502,
    check_body: false,
    expected_response_headers_missing: ['server-request-count']
  }
]

/** By the test's id: its corrected requests, the commit that corrected it and why. */
export const corrections = {
  'age-parse-nonnumeric': { ...INVALID_AGE, requests: fresh },
  'age-parse-negative': { ...INVALID_AGE, requests: fresh },
  'age-parse-float': { ...INVALID_AGE, requests: fresh },
  'age-parse-prefix-twoline': { ...AGE, requests: fresh },
  'age-parse-dup-0': { ...AGE, requests: fresh },
  'age-parse-dup-0-twoline': { ...AGE, requests: fresh },
  'age-parse-dup-old': { ...AGE, requests: twoLines },
  'stale-close-must-revalidate': { ...CLOSED, requests: notStored },
  'stale-close-proxy-revalidate': { ...CLOSED, requests: notStored },
  'stale-close-no-cache': { ...CLOSED, requests: notStored },
  'stale-close-s-maxage=2': { ...CLOSED, requests: notStored }
}

/** What a corrected test's id ends with. */
export const CORRECTED = ' (corrected)'

/** The corrected form of each of these tests that has one. */
export function corrected (tests) {
  return tests.filter(test => corrections[test.id]).map(test => ({
    ...test,
    id: test.id + CORRECTED,
    // The suite's client writes into the requests it is given.
    requests: structuredClone(corrections[test.id].requests(test))
  }))
}
