#!/usr/bin/env node
// Runs the npm package http-cache-tests against a proxy and compares the outcome of every test with expected.json.

import { spawn, spawnSync } from 'node:child_process'
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import net from 'node:net'
import os from 'node:os'
import path from 'node:path'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { parseArgs } from 'node:util'

import { CORRECTED, corrected, corrections } from './corrections.mjs'

const HERE = path.dirname(fileURLToPath(import.meta.url))
const SUITE = path.join(HERE, 'node_modules', 'http-cache-tests')
const START_TIMEOUT_MS = 20_000
const RUN_TIMEOUT_MS = 240_000
const RETRIES = 3
const KINDS = ['required', 'optimal', 'check']
// What must hold whatever is in the files: so many required tests at most may have a reason not to pass, and so large a
// share of the optimal ones has to.
const MOST_REASONS = 5
const LEAST_OPTIMAL = 0.9

const USAGE = `usage: node run.mjs --tidegate BINARY [--config FILE]    test this binary, compare with expected.json
       node run.mjs --base URL --origin-port PORT        test any proxy that is in front of that port

  --update          write the outcomes to expected.json
  --expected FILE   compare with FILE (with --base nothing is compared by default)
  --id TEST         run one test and show its requests and responses; nothing is compared
  --list            print every test that does not pass, with what the suite says about it
  --results FILE    also write what the suite prints, as JSON
  --config FILE     passed to tidegate

A changed outcome fails the run if the test has it again, also when it is better than before: accept it with --update.
A required test that does not pass needs its reason in reasons.json, or its corrected form in corrections.mjs has to pass.
At most ${MOST_REASONS} may have a reason, and at least ${100 * LEAST_OPTIMAL} % of the optimal tests have to pass.

example: node run.mjs --tidegate ../../target/debug/tidegate`

const children = new Set()
let scratch

class UserError extends Error {}

function options () {
  const { values } = parseArgs({
    options: {
      tidegate: { type: 'string' },
      config: { type: 'string' },
      base: { type: 'string' },
      'origin-port': { type: 'string' },
      update: { type: 'boolean' },
      expected: { type: 'string' },
      id: { type: 'string' },
      list: { type: 'boolean' },
      results: { type: 'string' },
      help: { type: 'boolean', short: 'h' }
    }
  })
  if (values.help) {
    console.log(USAGE)
    process.exit(0)
  }
  if (!values.tidegate === !values.base) throw new UserError(`give either --tidegate or --base\n\n${USAGE}`)
  if (values.base && !values['origin-port']) {
    throw new UserError('--base needs --origin-port: the port of 127.0.0.1 that the proxy forwards to')
  }
  if (values.base && values.update && !values.expected) {
    throw new UserError('expected.json is for tidegate: give --expected FILE to keep the outcomes of another proxy')
  }
  if (values.tidegate && !existsSync(values.tidegate)) {
    throw new UserError(`there is no ${values.tidegate}: build it with "cargo build -p tidegate"`)
  }
  return values
}

// Installation

function install () {
  const wanted = readJson(path.join(HERE, 'package.json')).dependencies['http-cache-tests']
  const manifest = path.join(SUITE, 'package.json')
  if (existsSync(manifest) && readJson(manifest).version === wanted) return
  console.log(`Installing http-cache-tests ${wanted} (npm ci) ...`)
  const done = spawnSync('npm', ['ci', '--ignore-scripts', '--no-audit', '--no-fund'], { cwd: HERE, stdio: ['ignore', 'inherit', 'inherit'] })
  if (done.status !== 0) throw new UserError('npm ci failed: see above')
}

// Processes

function start (name, command, args, { env = {}, cwd = HERE } = {}) {
  const child = spawn(command, args, { cwd, env: { ...process.env, ...env }, stdio: ['ignore', 'pipe', 'pipe'] })
  child.label = name
  child.output = ''
  children.add(child)
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', data => { child.output = (child.output + data).slice(-8192) })
  }
  child.ended = new Promise(resolve => {
    child.on('error', error => { child.output += error.message; resolve(1) })
    child.on('exit', (code, signal) => { children.delete(child); resolve(code ?? signal) })
  })
  return child
}

async function stop (child) {
  if (!children.has(child)) return
  child.kill('SIGTERM')
  const ended = await Promise.race([child.ended.then(() => true), sleep(3000)])
  if (!ended) child.kill('SIGKILL')
  await child.ended
}

const sleep = ms => new Promise(resolve => setTimeout(resolve, ms))

function freePort () {
  return new Promise((resolve, reject) => {
    const server = net.createServer()
    server.on('error', reject)
    server.listen(0, '127.0.0.1', () => {
      const { port } = server.address()
      server.close(() => resolve(port))
    })
  })
}

function accepts (host, port) {
  return new Promise(resolve => {
    const socket = net.connect({ host, port })
    socket.on('connect', () => { socket.destroy(); resolve(true) })
    socket.on('error', () => resolve(false))
  })
}

async function whenListening (child, host, port) {
  const deadline = Date.now() + START_TIMEOUT_MS
  while (!await accepts(host, port)) {
    if (child && !children.has(child)) throw new UserError(`${child.label} ended at its start:\n${child.output}`)
    if (Date.now() > deadline) throw new UserError(`nothing listens on ${host}:${port} after ${START_TIMEOUT_MS / 1000} s`)
    await sleep(50)
  }
}

// The suite reads its options from the variables that npm makes of them. They are set here, not through
// "npm run server --port=N", because that leaves the server behind as a process nobody can name.
function suiteEnvironment (settings) {
  const defaults = readJson(path.join(SUITE, 'package.json')).config
  const env = {}
  for (const [key, value] of Object.entries({ ...defaults, ...settings })) {
    env[`npm_config_${key}`] = String(value)
    env[`npm_package_config_${key}`] = String(value)
  }
  return env
}

async function startOrigin (port) {
  const env = suiteEnvironment({ port, pidfile: path.join(scratch, 'origin.pid') })
  const child = start('the origin server', process.execPath, ['server/server.mjs'], { cwd: SUITE, env })
  await whenListening(child, '127.0.0.1', port)
  return child
}

async function startTidegate (values, originPort) {
  const port = await freePort()
  const args = ['run', '--listen', `127.0.0.1:${port}`, '--upstream', `http://127.0.0.1:${originPort}`]
  if (values.config) args.push('--config', path.resolve(values.config))
  const child = start('tidegate', path.resolve(values.tidegate), args)
  await whenListening(child, '127.0.0.1', port)
  return { child, base: `http://127.0.0.1:${port}` }
}

// All tests, or these; with `dump` their requests and responses are printed.
async function runTests (base, ids = [], dump = false) {
  const args = ['--no-warnings', 'suite.mjs', base, ...(dump ? ['--dump'] : []), ...ids]
  const cli = spawn(process.execPath, args, { cwd: HERE, stdio: ['ignore', 'pipe', 'inherit'] })
  children.add(cli)
  let output = ''
  cli.stdout.on('data', data => {
    if (dump) process.stdout.write(data)
    output += data
  })
  const timer = setTimeout(() => cli.kill('SIGKILL'), RUN_TIMEOUT_MS)
  const code = await new Promise(resolve => cli.on('close', resolve))
  clearTimeout(timer)
  children.delete(cli)
  if (code !== 0) throw new UserError(`the suite did not finish within ${RUN_TIMEOUT_MS / 1000} s`)
  if (dump) return undefined
  try {
    return JSON.parse(output.slice(output.indexOf('{')))
  } catch {
    throw new UserError(`the suite printed no results:\n${output.slice(0, 2000)}`)
  }
}

// Outcomes

async function loadTests () {
  const load = async file => (await import(pathToFileURL(path.join(SUITE, 'tests', file)))).default
  const suites = [...await load('index.mjs'), await load('surrogate-control.mjs')]
  const tests = new Map()
  for (const suite of suites) {
    for (const test of [...suite.tests, ...corrected(suite.tests)]) {
      // A shared cache is not a browser's.
      if (test.browser_only) continue
      const kind = test.id.endsWith(CORRECTED) ? 'corrected' : test.kind ?? 'required'
      tests.set(test.id, { id: test.id, name: test.name, kind, dependsOn: test.depends_on ?? [] })
    }
  }
  return tests
}

// As the suite's own pages judge: a test counts only if those it depends on pass.
function outcomeOf (test, tests, results) {
  const result = results[test.id]
  if (result === undefined) return 'not run'
  for (const id of test.dependsOn) {
    if (!tests.has(id) || outcomeOf(tests.get(id), tests, results) !== 'pass') return 'dependency'
  }
  if (result === true) return 'pass'
  switch (result[0]) {
    case 'Setup': return result[1] === 'retry' ? 'retry' : 'setup'
    case 'Assertion': return 'fail'
    // Whatever else was thrown, for instance because the connection was closed.
    default: return 'error'
  }
}

function tabulate (tests, outcomes) {
  console.log('\nkind      passed  total')
  for (const kind of [...KINDS, 'corrected']) {
    const { passed, total } = count(kind, tests, outcomes)
    const note = NOTES[kind] ?? `${(100 * passed / total).toFixed(1)} %`
    console.log(`${kind.padEnd(9)} ${String(passed).padStart(6)} ${String(total).padStart(6)}  ${note}`)
  }
  const failed = [...tests.values()].filter(test => test.kind === 'required' && outcomes[test.id] !== 'pass')
  const mended = failed.filter(test => outcomes[test.id + CORRECTED] === 'pass')
  console.log(`\nOf ${failed.length} required tests that do not pass, ${mended.length} pass as their authors have corrected them since.`)
}

const NOTES = {
  check: 'pass and fail only describe',
  corrected: 'required tests as their authors have corrected them since'
}

function count (kind, tests, outcomes) {
  const ids = [...tests.values()].filter(test => test.kind === kind).map(test => test.id)
  return { passed: ids.filter(id => outcomes[id] === 'pass').length, total: ids.length }
}

function list (tests, outcomes, results) {
  for (const kind of [...KINDS, 'corrected']) {
    console.log(`\n${kind}, not passed:`)
    for (const test of tests.values()) {
      if (test.kind !== kind || outcomes[test.id] === 'pass') continue
      const detail = Array.isArray(results[test.id]) ? results[test.id][1] : ''
      console.log(`  ${test.id}  [${outcomes[test.id]}] ${detail}`)
    }
  }
}

// Returns what is wrong, one line each.
function compare (tests, outcomes, results, expected) {
  const problems = []
  for (const id of new Set([...Object.keys(expected), ...tests.keys()])) {
    const [was, is] = [expected[id] ?? 'unknown', outcomes[id] ?? 'gone']
    if (was === is) continue
    const detail = Array.isArray(results[id]) ? `: ${results[id][1]}` : ''
    problems.push(`${id} (${tests.get(id)?.kind ?? '?'}): expected ${was}, got ${is}${detail}`)
  }
  return problems
}

function checkReasons (tests, outcomes) {
  const reasons = readJson(path.join(HERE, 'reasons.json'))
  const problems = []
  for (const test of tests.values()) {
    const needs = test.kind === 'required' && outcomes[test.id] !== 'pass' && !corrections[test.id]
    if (needs && !reasons[test.id]) problems.push(`${test.id}: a required test that does not pass has no reason in reasons.json`)
  }
  for (const id of Object.keys(reasons)) {
    if (!tests.has(id)) problems.push(`${id}: reasons.json names a test that does not exist`)
    else if (outcomes[id] === 'pass') problems.push(`${id}: reasons.json gives a reason, but the test passes`)
    else if (corrections[id]) problems.push(`${id}: has a reason in reasons.json and a corrected form too`)
  }
  return problems
}

// What the expected outcomes cannot allow, also when they are written anew.
function checkBounds (tests, outcomes) {
  const problems = []
  for (const id of Object.keys(corrections)) {
    if (!tests.has(id)) problems.push(`${id}: corrections.mjs corrects a test that does not exist`)
    else if (outcomes[id] === 'pass') problems.push(`${id}: passes as published, so that it needs no corrected form`)
    else if (outcomes[id + CORRECTED] !== 'pass') problems.push(`${id}: does not pass in its corrected form either`)
  }
  const required = [...tests.values()].filter(test => test.kind === 'required')
  const listed = required.filter(test => outcomes[test.id] !== 'pass' && outcomes[test.id + CORRECTED] !== 'pass')
  if (listed.length > MOST_REASONS) {
    problems.push(`${listed.length} required tests do not pass, at most ${MOST_REASONS} may: ${listed.map(test => test.id).join(', ')}`)
  }
  const { passed, total } = count('optimal', tests, outcomes)
  if (passed < LEAST_OPTIMAL * total) problems.push(`${passed} of ${total} optimal tests pass: fewer than ${100 * LEAST_OPTIMAL} %`)
  return problems
}

const readJson = file => JSON.parse(readFileSync(file, 'utf8'))

async function main () {
  const values = options()
  install()
  scratch = mkdtempSync(path.join(os.tmpdir(), 'cache-suite-'))
  const originPort = values['origin-port'] ? Number(values['origin-port']) : await freePort()
  const running = [await startOrigin(originPort)]
  let base = values.base
  if (values.tidegate) {
    const tidegate = await startTidegate(values, originPort)
    running.unshift(tidegate.child)
    base = tidegate.base
  }
  const tests = await loadTests()
  if (values.id && !tests.has(values.id)) throw new UserError(`there is no test ${values.id} for shared caches`)
  if (!values.id) console.log(`Running ${tests.size} cache tests through ${base} (about half a minute) ...`)
  const results = await (values.id ? runTests(base, [values.id], true) : runTests(base))
  if (values.tidegate && !values.id && !values.update) await lookAgain(values, tests, results, base)
  const crashed = running.filter(child => !children.has(child))
  for (const child of running) await stop(child)
  if (crashed.length > 0) {
    throw new UserError(crashed.map(child => `${child.label} ended during the tests:\n${child.output}`).join('\n'))
  }
  if (values.id) return 0
  if (values.results) writeFileSync(values.results, JSON.stringify(results, null, 2) + '\n')
  return judge(values, tests, results)
}

const outcomesOf = (tests, results) =>
  Object.fromEntries([...tests.values()].map(test => [test.id, outcomeOf(test, tests, results)]))

// The tests count in whole seconds, a hundred of them at once: on a busy machine one may miss its second. What differs
// from what is expected is run again by itself and has to differ each time; what does not is named.
async function lookAgain (values, tests, results, base) {
  const file = values.expected ?? path.join(HERE, 'expected.json')
  if (!existsSync(file)) return
  const expected = readJson(file)
  const differs = outcomes => Object.keys(outcomes).filter(id => outcomes[id] !== expected[id])
  for (let attempt = 0; attempt < RETRIES; attempt++) {
    const before = outcomesOf(tests, results)
    const ids = differs(before)
    if (ids.length === 0) return
    console.log(`\n${ids.length} outcomes differ from what is expected: once more ...`)
    // A test whose dependency differs is judged by that too.
    const again = await runTests(base, ids.filter(id => tests.has(id)))
    const outcomes = outcomesOf(tests, { ...results, ...again })
    for (const id of ids.filter(id => outcomes[id] === expected[id])) {
      console.log(`  ${id}: ${before[id]} at first, then ${outcomes[id]}`)
      if (id in again) results[id] = again[id]
    }
  }
}

function judge (values, tests, results) {
  const outcomes = outcomesOf(tests, results)
  tabulate(tests, outcomes)
  if (values.list) list(tests, outcomes, results)
  const file = values.expected ?? (values.tidegate && path.join(HERE, 'expected.json'))
  if (!file) return 0
  let problems = []
  if (values.update) {
    const sorted = Object.fromEntries(Object.entries(outcomes).sort(([a], [b]) => (a < b ? -1 : 1)))
    writeFileSync(file, JSON.stringify(sorted, null, 2) + '\n')
    console.log(`\nWrote ${path.relative(process.cwd(), file)}.`)
  } else {
    if (!existsSync(file)) throw new UserError(`there is no ${file}: make it with --update`)
    problems = compare(tests, outcomes, results, readJson(file))
  }
  if (values.tidegate) problems.push(...checkReasons(tests, outcomes), ...checkBounds(tests, outcomes))
  if (problems.length === 0) {
    console.log('\nEvery outcome is as expected.')
    return 0
  }
  console.error(`\n${problems.length} differences from what is expected:`)
  for (const problem of problems) console.error(`  ${problem}`)
  return 1
}

function cleanUp () {
  for (const child of children) child.kill('SIGKILL')
  if (scratch) rmSync(scratch, { recursive: true, force: true })
}

process.on('exit', cleanUp)
for (const [signal, number] of [['SIGINT', 2], ['SIGTERM', 15], ['SIGHUP', 1]]) {
  process.on(signal, () => process.exit(128 + number))
}

main().then(code => { process.exitCode = code }, error => {
  console.error(error instanceof UserError || error.code?.startsWith('ERR_PARSE_ARGS') ? `error: ${error.message}` : error)
  process.exitCode = error.code?.startsWith('ERR_PARSE_ARGS') ? 2 : 1
}).finally(() => cleanUp())
