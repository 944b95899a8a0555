// The two Java processes of execution.py, compiled once per Python process: the harness compiles programs and runs their
// tests; the program, in a separate sandbox, only answers calls. They exchange plain values. An object of a class that
// the prompt doesn't declare is rejected, and ends the tests.
//
// The tests are compiled with the prompt's classes, not with the program's. Their static members are the prompt's own
// code, which runs in the harness; the method that the response completes calls the program, and so do constructors and
// methods of objects, with the prompt's signatures. So the tests see no overload, static block or class of the response.
// The harness reads the program's signatures only if the response declares a class or member itself.

import java.io.*;
import java.lang.reflect.*;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.net.URI;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.function.BiFunction;
import java.util.function.Function;
import java.util.function.ToIntFunction;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import javax.lang.model.element.*;
import javax.lang.model.element.Modifier; // java.lang.reflect has one too
import javax.lang.model.type.TypeKind;
import javax.lang.model.type.TypeMirror;
import javax.lang.model.util.ElementFilter;
import javax.lang.model.util.Elements;
import javax.lang.model.util.Types;
import javax.tools.*;

import com.sun.source.tree.*;
import com.sun.source.util.JavacTask;
import com.sun.source.util.SourcePositions;
import com.sun.source.util.TreePath;
import com.sun.source.util.Trees;

// ------------------------------------------------------------------------------------------------- 1. the program
/** Answers calls of class files: NanoRlhfProgram CALLS REPLIES, two pipes. Ends when CALLS does. */
class NanoRlhfProgram {
    private static final List<Object> OBJECTS = new ArrayList<>(); // objects that the tests refer to, by number
    private static final Map<Object, Integer> NUMBERS = new IdentityHashMap<>();

    public static void main(String[] args) throws IOException {
        DataInputStream calls = new DataInputStream(new FileInputStream(args[0]));
        DataOutputStream replies = new DataOutputStream(new FileOutputStream(args[1]));
        PrintStream err = System.err; // the program may replace System.err
        while (true) {
            byte[] call;
            try {
                call = calls.readNBytes(calls.readInt());
            } catch (EOFException end) {
                return;
            }
            byte[] reply;
            try {
                reply = answer(call);
            } catch (Throwable error) {
                Throwable thrown = error instanceof InvocationTargetException ? error.getCause() : error;
                String name = thrown.getClass().getName();
                String message = "";
                try {
                    message = String.valueOf(thrown.getMessage());
                    thrown.printStackTrace(err);
                } catch (Throwable another) { // from a method of the program's own exception
                    err.println(name);
                }
                reply = NanoRlhfValues.toBytes(new Object[] {false, name, message}, NanoRlhfProgram::numberOf);
            }
            replies.writeInt(reply.length);
            replies.write(reply);
        }
    }

    /**
     * A call: class, name, types (null: a field), target, arguments.
     * A reply: true, value, and the arguments after the call; or false, the exception's class and message.
     */
    private static byte[] answer(byte[] bytes) throws Throwable {
        Object[] call = (Object[]) NanoRlhfValues.fromBytes(bytes, (number, type) -> OBJECTS.get(number));
        Class<?> owner = Class.forName((String) call[0]);
        String name = (String) call[1];
        String[] types = (String[]) call[2];
        Object target = call[3];
        Object[] arguments = (Object[]) call[4];
        Object value;
        if (types == null) {
            Field field = owner.getDeclaredField(name);
            field.setAccessible(true);
            value = field.get(target);
        } else if (name.equals("<init>")) {
            Constructor<?> constructor = (Constructor<?>) find(owner.getDeclaredConstructors(), owner.getName(), types);
            value = constructor.newInstance(arguments);
        } else {
            value = ((Method) find(owner.getDeclaredMethods(), name, types)).invoke(target, arguments);
        }
        return NanoRlhfValues.toBytes(new Object[] {true, value, arguments}, NanoRlhfProgram::numberOf);
    }

    private static Executable find(Executable[] all, String name, String[] types) throws NoSuchMethodException {
        for (Executable one : all) {
            Object[] own = Arrays.stream(one.getParameterTypes()).map(Class::getCanonicalName).toArray();
            boolean bridge = one instanceof Method method && method.isBridge();
            if (one.getName().equals(name) && Arrays.equals(own, types) && !bridge) {
                one.setAccessible(true);
                return one;
            }
        }
        throw new NoSuchMethodException(name + Arrays.toString(types));
    }

    private static int numberOf(Object object) {
        return NUMBERS.computeIfAbsent(object, o -> {
            OBJECTS.add(o);
            return OBJECTS.size() - 1;
        });
    }
}

// ------------------------------------------------------------------------------------------------- 2. plain values
/**
 * Plain values as bytes: numbers, strings, arrays and java.util's containers, each by its type. Any other object is
 * written as a number that refers to it. A subclass is written as the class of java.util that it extends: the reader
 * builds new values and runs no code of the writer.
 */
class NanoRlhfValues {
    /** By class: make a container of these items. A map's items are its keys and values in turn. */
    private static final Map<String, Function<List<Object>, Object>> CONTAINERS = new HashMap<>();

    static {
        CONTAINERS.put("java.util.ArrayList", ArrayList::new);
        CONTAINERS.put("java.util.Arrays$ArrayList", items -> items);
        CONTAINERS.put("java.util.LinkedList", LinkedList::new);
        CONTAINERS.put("java.util.Vector", Vector::new);
        CONTAINERS.put("java.util.Stack", items -> {
            Stack<Object> stack = new Stack<>();
            stack.addAll(items);
            return stack;
        });
        CONTAINERS.put("java.util.ImmutableCollections$AbstractImmutableList", Collections::unmodifiableList);
        CONTAINERS.put("java.util.HashSet", HashSet::new);
        CONTAINERS.put("java.util.LinkedHashSet", LinkedHashSet::new);
        CONTAINERS.put("java.util.TreeSet", TreeSet::new);
        CONTAINERS.put("java.util.ArrayDeque", ArrayDeque::new);
        CONTAINERS.put("java.util.PriorityQueue", PriorityQueue::new);
        CONTAINERS.put("java.util.HashMap", items -> new HashMap<>(map(items)));
        CONTAINERS.put("java.util.LinkedHashMap", NanoRlhfValues::map);
        CONTAINERS.put("java.util.TreeMap", items -> new TreeMap<>(map(items)));
        CONTAINERS.put("java.util.ImmutableCollections$AbstractImmutableMap", i -> Collections.unmodifiableMap(map(i)));
        CONTAINERS.put("java.util.AbstractMap$SimpleEntry", i -> new AbstractMap.SimpleEntry<>(i.get(0), i.get(1)));
        CONTAINERS.put("java.util.Optional", items -> items.stream().findFirst());
    }

    private static Map<Object, Object> map(List<Object> items) {
        Map<Object, Object> map = new LinkedHashMap<>();
        for (int i = 0; i + 1 < items.size(); i += 2) {
            map.put(items.get(i), items.get(i + 1));
        }
        return map;
    }

    /** The class of java.util that a container extends. */
    private static String classOf(Object container) {
        for (Class<?> type = container.getClass(); type != null; type = type.getSuperclass()) {
            if (CONTAINERS.containsKey(type.getName())) {
                return type.getName();
            }
        }
        boolean isMap = container instanceof Map;
        return container instanceof List ? "java.util.ArrayList" : container instanceof Set ? "java.util.LinkedHashSet"
            : isMap ? "java.util.LinkedHashMap" : "java.util.AbstractMap$SimpleEntry";
    }

    /** The items of a container; null for any other object. */
    private static Object[] itemsOf(Object value) {
        if (value instanceof Map<?, ?> map) {
            return map.entrySet().stream().flatMap(entry -> Stream.of(entry.getKey(), entry.getValue())).toArray();
        } else if (value instanceof Map.Entry<?, ?> entry) {
            return new Object[] {entry.getKey(), entry.getValue()};
        } else if (value instanceof Optional<?> optional) {
            return optional.stream().toArray();
        }
        boolean isQueue = value instanceof ArrayDeque || value instanceof PriorityQueue;
        return isQueue || value instanceof List || value instanceof Set ? ((Collection<?>) value).toArray() : null;
    }

    static byte[] toBytes(Object value, ToIntFunction<Object> numberOf) {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        try {
            write(new DataOutputStream(bytes), value, numberOf);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        return bytes.toByteArray();
    }

    /** objectOf: from an object's number and class. Throws a RuntimeException for bytes that aren't a valid value. */
    static Object fromBytes(byte[] bytes, BiFunction<Integer, String, Object> objectOf) {
        try {
            return read(new DataInputStream(new ByteArrayInputStream(bytes)), objectOf);
        } catch (IOException | ClassNotFoundException error) {
            throw new IllegalArgumentException(error);
        }
    }

    private static void writeText(DataOutputStream out, String text) throws IOException {
        out.writeInt(text.length());
        out.writeChars(text); // UTF-16 can encode any string, unlike UTF-8
    }

    private static String readText(DataInputStream in) throws IOException {
        return ByteBuffer.wrap(in.readNBytes(2 * in.readInt())).asCharBuffer().toString();
    }

    private static void write(DataOutputStream out, Object value, ToIntFunction<Object> numberOf) throws IOException {
        if (value == null) {
            out.writeByte('n');
        } else if (value instanceof Boolean v) {
            out.writeByte('z');
            out.writeBoolean(v);
        } else if (value instanceof Byte v) {
            out.writeByte('b');
            out.writeByte(v);
        } else if (value instanceof Short v) {
            out.writeByte('s');
            out.writeShort(v);
        } else if (value instanceof Character v) {
            out.writeByte('c');
            out.writeChar(v);
        } else if (value instanceof Integer v) {
            out.writeByte('i');
            out.writeInt(v);
        } else if (value instanceof Long v) {
            out.writeByte('l');
            out.writeLong(v);
        } else if (value instanceof Float v) {
            out.writeByte('f');
            out.writeInt(Float.floatToRawIntBits(v));
        } else if (value instanceof Double v) {
            out.writeByte('d');
            out.writeLong(Double.doubleToRawLongBits(v));
        } else if (value instanceof String v) {
            out.writeByte('S');
            writeText(out, v);
        } else if (value.getClass() == BigInteger.class) {
            out.writeByte('I');
            writeText(out, value.toString());
        } else if (value.getClass() == BigDecimal.class) {
            out.writeByte('D');
            writeText(out, ((BigDecimal) value).unscaledValue().toString());
            out.writeInt(((BigDecimal) value).scale());
        } else if (value.getClass().isArray() && plain(value.getClass())) {
            out.writeByte('[');
            writeItems(out, value.getClass().descriptorString().replace('/', '.'), value, numberOf);
        } else {
            Object[] items = itemsOf(value);
            if (items != null) {
                out.writeByte('C');
                writeItems(out, classOf(value), items, numberOf);
            } else {
                out.writeByte('R');
                out.writeInt(numberOf.applyAsInt(value));
                writeText(out, value.getClass().getName());
            }
        }
    }

    private static void writeItems(DataOutputStream out, String type, Object items, ToIntFunction<Object> numberOf)
        throws IOException {
        writeText(out, type);
        int length = Array.getLength(items);
        out.writeInt(length);
        for (int i = 0; i < length; i++) {
            write(out, Array.get(items, i), numberOf);
        }
    }

    private static boolean plain(Class<?> array) {
        Class<?> type = array.getComponentType();
        return type.isArray() ? plain(type) : type.getClassLoader() == null; // the JDK's
    }

    private static Object read(DataInputStream in, BiFunction<Integer, String, Object> objectOf)
        throws IOException, ClassNotFoundException {
        int tag = in.readByte();
        switch (tag) {
            case 'n': return null;
            case 'z': return in.readBoolean();
            case 'b': return in.readByte();
            case 's': return in.readShort();
            case 'c': return in.readChar();
            case 'i': return in.readInt();
            case 'l': return in.readLong();
            case 'f': return Float.intBitsToFloat(in.readInt());
            case 'd': return Double.longBitsToDouble(in.readLong());
            case 'S': return readText(in).intern(); // like the literals in the tests: programs compare them by ==
            case 'I': return new BigInteger(readText(in));
            case 'D': return new BigDecimal(new BigInteger(readText(in)), in.readInt());
            case 'R': return objectOf.apply(in.readInt(), readText(in));
            case '[': case 'C': {
                String type = readText(in);
                int length = in.readInt();
                if (length > in.available()) { // each item takes at least a byte
                    throw new IOException(length + " items");
                }
                Class<?> array = tag == '[' ? Class.forName(type, false, null) : Object[].class;
                Object items = Array.newInstance(array.getComponentType(), length);
                for (int i = 0; i < length; i++) {
                    Array.set(items, i, read(in, objectOf));
                }
                return tag == '[' ? items : CONTAINERS.get(type).apply(Arrays.asList((Object[]) items));
            }
            default: throw new IOException("a value of type " + tag);
        }
    }

    /** After a call, copy the program's changes of an argument into the tests' object. */
    @SuppressWarnings("unchecked")
    static void restore(Object mine, Object after) {
        if (mine == null || after == null || mine.equals(after)) {
            return;
        }
        if (mine.getClass().isArray() && mine.getClass() == after.getClass()) {
            for (int i = 0; i < Math.min(Array.getLength(mine), Array.getLength(after)); i++) {
                Object old = Array.get(mine, i);
                if (old != null && old.getClass().isArray()) {
                    restore(old, Array.get(after, i));
                } else {
                    Array.set(mine, i, Array.get(after, i));
                }
            }
        } else if (mine instanceof List && after instanceof List && ((List<?>) mine).size() == ((List<?>) after).size()) {
            Collections.copy((List<Object>) mine, (List<Object>) after); // Arrays.asList has a fixed size
        } else if (mine instanceof Collection && after instanceof Collection) {
            ((Collection<Object>) mine).clear();
            ((Collection<Object>) mine).addAll((Collection<Object>) after);
        } else if (mine instanceof Map && after instanceof Map) {
            ((Map<Object, Object>) mine).clear();
            ((Map<Object, Object>) mine).putAll((Map<Object, Object>) after);
        }
    }
}

// -------------------------------------------------------------------------------------------------- 3. the harness
/**
 * Compiles one program after another and runs their tests. All messages start with their length.
 *
 *   in    compile: directory for the class files, the program's prefix, response and suffix, the tests
 *   out   'c', nothing or javac's messages; if there are messages, the request ends here
 *   in    an empty message: run the tests; any other: don't, the program has already failed
 *   out   'q', a call for the program                                     } any number of times
 *   in    the program's reply, or nothing if it has ended                 }
 *   out   'v', the verdict, a line feed, the tests' output
 */
class NanoRlhfHarness {
    private static final int TAIL = 8000; // characters of the tests' output to keep
    private static final Pattern NAME = Pattern.compile("(?<![\\w.$])[A-Za-z_$][\\w$]*");
    private static final DataInputStream IN = new DataInputStream(System.in);
    private static final DataOutputStream OUT = new DataOutputStream(new FileOutputStream(FileDescriptor.out));

    public static void main(String[] args) throws IOException {
        while (true) { // until the input ends: EOFException
            String[] request = new String[5];
            for (int i = 0; i < request.length; i++) {
                request[i] = new String(receive(), StandardCharsets.UTF_8);
            }
            Map<String, byte[]> classes = new HashMap<>();
            String problem = compile(
                new File(args[0]), new File(request[0]), request[1], request[2], request[3], request[4], classes);
            send('c', problem.getBytes(StandardCharsets.UTF_8));
            if (problem.isEmpty() && receive().length == 0) {
                send('v', run(classes).getBytes(StandardCharsets.UTF_8));
            }
        }
    }

    static byte[] ask(byte[] call) {
        try {
            send('q', call);
            byte[] reply = receive();
            if (reply.length == 0) {
                throw new NanoRlhfTests.Ended();
            }
            return reply;
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static byte[] receive() throws IOException {
        return IN.readNBytes(IN.readInt());
    }

    private static synchronized void send(char kind, byte[] content) throws IOException {
        OUT.writeByte(kind);
        OUT.writeInt(content.length);
        OUT.write(content);
        OUT.flush();
    }

    // ------------------------------------------------------------------------------------------------ 3.1 the tests
    private static String run(Map<String, byte[]> classes) {
        ClassLoader loader = new ClassLoader(NanoRlhfHarness.class.getClassLoader()) {
            @Override protected Class<?> findClass(String name) throws ClassNotFoundException {
                byte[] code = classes.get(name);
                if (code == null) {
                    throw new ClassNotFoundException(name);
                }
                return defineClass(name, code, 0, code.length);
            }
        };
        NanoRlhfTests.begin(loader);
        Tail tail = new Tail();
        PrintStream stdout = System.out, stderr = System.err;
        PrintStream captured = new PrintStream(tail, true, StandardCharsets.UTF_8);
        System.setOut(captured);
        System.setErr(captured);
        Throwable thrown = null;
        try {
            Method main = Class.forName("Main", true, loader).getMethod("main", String[].class);
            main.setAccessible(true);
            main.invoke(null, (Object) new String[0]);
        } catch (InvocationTargetException error) {
            thrown = error.getCause();
        } catch (Throwable error) {
            thrown = error;
        } finally {
            System.setOut(stdout);
            System.setErr(stderr);
        }
        if (thrown instanceof ExceptionInInitializerError error && error.getCause() != null) {
            thrown = error.getCause();
        }
        String word = "passed";
        if (thrown instanceof OutOfMemoryError) {
            word = "memory";
        } else if (thrown != null) {
            StackTraceElement[] frames = thrown.getStackTrace();
            boolean byTheTest = frames.length > 0 && frames[0].getClassName().equals("Main");
            boolean isVerdict = thrown.getClass() == Exception.class || thrown.getClass() == AssertionError.class;
            word = byTheTest && isVerdict ? "wrong_answer" : "exception";
            if (thrown != NanoRlhfTests.raised) { // the program prints its own exceptions
                thrown.setStackTrace(
                    Arrays.stream(frames).filter(f -> f.getClassName().startsWith("Main")).toArray(StackTraceElement[]::new));
                thrown.printStackTrace(captured);
            }
        } else if (NanoRlhfTests.isBroken) {
            word = "exception";
        } else if (NanoRlhfTests.failures > 0) {
            word = "wrong_answer";
        }
        return word + "\n" + tail.toString(StandardCharsets.UTF_8);
    }

    /** Keeps the end of what is written. */
    private static class Tail extends ByteArrayOutputStream {
        @Override public synchronized void write(byte[] bytes, int start, int length) {
            super.write(bytes, start, length);
            if (count > 2 * TAIL) {
                System.arraycopy(buf, count - TAIL, buf, 0, TAIL);
                count = TAIL;
            }
        }

        @Override public synchronized void write(int b) {
            write(new byte[] {(byte) b}, 0, 1);
        }
    }

    // --------------------------------------------------------------------------------------------- 3.2 the compiler
    private static final JavaCompiler JAVAC = ToolProvider.getSystemJavaCompiler();
    private static final StandardJavaFileManager FILES = JAVAC.getStandardFileManager(null, null, null);
    private static final List<String> OPTIONS = List.of("-proc:none", "-nowarn", "-implicit:none");

    /**
     * Compile a program separately, to a directory, then its tests against stubs of its classes, to memory. No text of
     * the response reaches the compilation of the tests: the stubs come from the prompt, or from the signatures of
     * classes that the response declares. Returns "" or javac's messages.
     */
    private static String compile(
        File launcher, File directory, String prefix, String response, String suffix, String tests,
        Map<String, byte[]> classes
    ) throws IOException {
        DiagnosticCollector<JavaFileObject> found = new DiagnosticCollector<>();
        StringWriter crash = new StringWriter(); // what javac prints besides its diagnostics
        FILES.setLocation(StandardLocation.CLASS_PATH, List.of());
        FILES.setLocation(StandardLocation.CLASS_OUTPUT, List.of(directory));
        Source source = new Source("Main", prefix + response + suffix);
        JavacTask task = (JavacTask) JAVAC.getTask(crash, FILES, found, OPTIONS, null, List.of(source));
        Map<String, TypeElement> own = new LinkedHashMap<>(); // the program's top-level classes
        ElementFilter.typesIn(task.analyze()).forEach(type -> own.put(type.getQualifiedName().toString(), type));
        String problem = problems(found, crash, "");
        if (!problem.isEmpty()) {
            return problem;
        }
        Matcher declared = Pattern.compile("\\bclass\\s+([\\w$]+)").matcher(tests);
        while (declared.find()) {
            if (own.containsKey(declared.group(1))) {
                return "error: duplicate class: " + declared.group(1) + ", the tests have one of this name";
            }
        }
        Prompt prompt = new Prompt(prefix, suffix);
        Set<String> closed = new HashSet<>(own.keySet());
        closed.removeIf(name -> prompt.types.containsKey(name) || !prompt.means(name));
        Map<String, String> stubs = new LinkedHashMap<>();
        prompt.types.forEach((name, type) -> stubs.put(name, stub(type, prompt, task, own, closed, true, false)));
        if (!prompt.holdsResponse) {
            own.keySet().removeIf(name -> closed.contains(name) || stubs.containsKey(name));
            own.forEach((name, type) -> stubs.put(name, stub(type, null, task, own, closed, false, false)));
        }
        Map<String, String> asked = new LinkedHashMap<>(stubs); // without the prompt's own code
        prompt.types.forEach((name, type) -> asked.put(name, stub(type, prompt, task, own, closed, false, false)));
        task.generate(); // afterwards javac has dropped the classes
        problem = problems(found, crash, "");
        if (!problem.isEmpty()) {
            return problem;
        }
        FILES.setLocation(StandardLocation.CLASS_PATH, List.of(launcher));
        problem = compileTests(tests, prompt.imports, mentioned(stubs, tests), classes);
        if (!problem.isEmpty()) { // the prompt's own code may need its objects' fields, which the program has
            StringBuilder text = new StringBuilder();
            prompt.types.values().forEach(type -> text.append(stub(type, prompt, task, Map.of(), Set.of(), true, false)));
            if (!compileTests("", prompt.imports, text.toString(), new HashMap<>()).isEmpty()) {
                classes.clear();
                problem = compileTests(tests, prompt.imports, mentioned(asked, tests), classes);
            }
        }
        return problem;
    }

    private static String compileTests(String tests, String imports, String stubs, Map<String, byte[]> classes) {
        DiagnosticCollector<JavaFileObject> found = new DiagnosticCollector<>();
        StringWriter crash = new StringWriter();
        List<Source> sources = List.of(new Source("Main", imports + tests), new Source("Stubs", imports + stubs));
        JAVAC.getTask(crash, new InMemory(classes), found, OPTIONS, null, sources).call();
        return problems(found, crash, "the tests don't fit the program: ");
    }

    /** The text of the stubs that the tests mention, directly or through other stubs. */
    private static String mentioned(Map<String, String> stubs, String tests) {
        StringBuilder text = new StringBuilder();
        Set<String> done = new HashSet<>();
        Deque<String> todo = new ArrayDeque<>(namesIn(tests, stubs.keySet()));
        while (!todo.isEmpty()) {
            String name = todo.poll();
            if (done.add(name)) {
                text.append(stubs.get(name));
                todo.addAll(namesIn(stubs.get(name), stubs.keySet()));
            }
        }
        return text.toString();
    }

    /** The classes that the prompt declares, as javac sees them without the response. */
    private static class Prompt {
        private static final Pattern NO_CODE = Pattern.compile( // comments, text blocks, strings, characters
            "/\\*.*?\\*/|//[^\\r\\n]*|\"\"\".*?\"\"\"|\"(?:\\\\.|[^\"\\\\\\r\\n])*\"|'(?:\\\\.|[^'\\\\])+'", Pattern.DOTALL);
        private static final List<String> FILLERS = List.of("\nthrow null;", "\n", "\nnull;", "\nnull);", "\n;");
        final Map<String, TypeElement> types = new LinkedHashMap<>(); // the top-level ones
        final String imports; // one per line
        final boolean holdsResponse; // the response is part of one of these classes
        final JavacTask task;
        private final String text;
        private final int hole;
        private final CompilationUnitTree unit;
        private final Trees trees;
        private final SourcePositions positions;

        Prompt(String prefix, String suffix) throws IOException {
            String code = NO_CODE.matcher(prefix).replaceAll(" ");
            long depth = code.chars().filter(c -> c == '{').count() - code.chars().filter(c -> c == '}').count();
            String end = "}".repeat((int) Math.max(depth, 0));
            List<String> texts = new ArrayList<>();
            FILLERS.forEach(filler -> texts.add(prefix + filler + suffix));
            FILLERS.forEach(filler -> texts.add(prefix + filler + end));
            texts.add(prefix);
            JavacTask parsed = null;
            CompilationUnitTree tree = null;
            String whole = null;
            for (Iterator<String> each = texts.iterator(); each.hasNext(); ) { // the last one as javac repairs it
                DiagnosticCollector<JavaFileObject> found = new DiagnosticCollector<>();
                whole = each.next();
                parsed = (JavacTask) JAVAC.getTask(
                    new StringWriter(), FILES, found, OPTIONS, null, List.of(new Source("Prompt", whole)));
                tree = parsed.parse().iterator().next();
                if (found.getDiagnostics().stream().noneMatch(d -> d.getKind() == Diagnostic.Kind.ERROR)) {
                    break;
                }
            }
            task = parsed;
            text = whole;
            unit = tree;
            hole = prefix.length();
            trees = Trees.instance(task);
            positions = trees.getSourcePositions();
            task.analyze();
            boolean holds = false;
            for (Tree type : unit.getTypeDecls()) {
                if (trees.getElement(TreePath.getPath(unit, type)) instanceof TypeElement element
                    && !element.getSimpleName().toString().startsWith("NanoRlhf")) {
                    types.put(element.getQualifiedName().toString(), element);
                    holds |= holds(type);
                }
            }
            holdsResponse = holds;
            String lines = unit.getImports().stream().map(Tree::toString).collect(Collectors.joining());
            imports = lines.isEmpty() ? "import java.util.*;\n" : lines.replaceAll("\\R+", "\n");
        }

        private boolean holds(Tree tree) {
            return positions.getStartPosition(unit, tree) <= hole && hole < positions.getEndPosition(unit, tree);
        }

        /** Whether the response is between this class's members. */
        boolean completes(TypeElement type) {
            ClassTree tree = trees.getTree(type);
            return holds(tree) && tree.getMembers().stream().noneMatch(this::holds);
        }

        /** The response may not define a name that java.lang or an import already defines, such as Math. */
        boolean means(String name) {
            Elements elements = task.getElements();
            boolean isTaken = name.startsWith("NanoRlhf") || name.equals("java") || name.equals("javax");
            isTaken |= elements.getTypeElement("java.lang." + name) != null;
            for (ImportTree each : unit.getImports()) {
                String imported = each.getQualifiedIdentifier().toString();
                String owner = imported.substring(0, imported.lastIndexOf('.'));
                isTaken |= imported.equals(owner + "." + name)
                    || imported.endsWith("*") && elements.getTypeElement(owner + "." + name) != null;
            }
            return isTaken || unit.getImports().isEmpty() && elements.getTypeElement("java.util." + name) != null;
        }

        /** The members of a class that need no object, as the prompt writes them, without what the response is in. */
        Map<Element, String> staticCode(TypeElement type) {
            Map<Element, String> code = new LinkedHashMap<>();
            Element last = type; // to which the blocks between the members belong
            long start = -1;
            for (Tree member : trees.getTree(type).getMembers()) {
                Element element = trees.getElement(new TreePath(trees.getPath(type), member));
                boolean isBlock = member instanceof BlockTree block && block.isStatic();
                boolean isStatic = isBlock || element != null && element.getModifiers().contains(Modifier.STATIC)
                    && (element.getKind() == ElementKind.FIELD || element.getKind() == ElementKind.METHOD);
                if (isStatic && !holds(member)) {
                    String slice = text.substring(
                        (int) positions.getStartPosition(unit, member), (int) positions.getEndPosition(unit, member));
                    if (start == positions.getStartPosition(unit, member)) { // int a, b;
                        code.put(last, "");
                    }
                    start = positions.getStartPosition(unit, member);
                    last = isBlock ? last : element;
                    code.merge(last, slice + "\n", String::concat);
                }
            }
            return code;
        }
    }

    private static String problems(DiagnosticCollector<JavaFileObject> found, StringWriter crash, String prefix) {
        StringBuilder messages = new StringBuilder();
        for (Diagnostic<?> diagnostic : found.getDiagnostics()) {
            if (diagnostic.getKind() == Diagnostic.Kind.ERROR) {
                messages.append(prefix).append(diagnostic).append('\n');
            }
        }
        if (messages.isEmpty() && !crash.toString().isEmpty()) {
            throw new IllegalStateException(crash.toString()); // out of memory or stack, or a bug in javac
        }
        return messages.toString();
    }

    private static List<String> namesIn(String text, Set<String> among) {
        return NAME.matcher(text).results().map(match -> match.group()).filter(among::contains).distinct().toList();
    }

    /**
     * A class with the name and signatures of another, whose methods call the program. With `copies`, static members are
     * the prompt's own code instead. Without a prompt, the class is the response's.
     */
    private static String stub(
        TypeElement type, Prompt prompt, JavacTask program, Map<String, TypeElement> own, Set<String> closed, boolean copies,
        boolean nested
    ) {
        JavacTask task = prompt == null ? program : prompt.task;
        Map<Element, String> code = copies ? prompt.staticCode(type) : Map.of();
        String name = type.getSimpleName().toString();
        boolean inner = type.getNestingKind().isNested() && !type.getModifiers().contains(Modifier.STATIC);
        String owner = "NanoRlhfTests.call(\"" + task.getElements().getBinaryName(type) + "\", \"";
        StringBuilder text = new StringBuilder(nested ? "public static class " : "class ").append(name);
        text.append(parameters(type.getTypeParameters())).append(" extends NanoRlhfTests.Remote {\n");
        text.append(name).append("(NanoRlhfTests.Handle handle) { super(handle); }\n");
        List<Element> members = new ArrayList<>(type.getEnclosedElements());
        if (prompt != null && own.containsKey(name) && !nested && prompt.completes(type)) { // the response writes members of its own
            Set<String> given = members.stream().map(m -> m.getSimpleName().toString()).collect(Collectors.toSet());
            own.get(name).getEnclosedElements().stream().filter(m -> !given.contains(m.getSimpleName().toString()))
                .forEach(members::add);
        }
        text.append(code.getOrDefault(type, ""));
        for (Element member : members) {
            boolean isStatic = member.getModifiers().contains(Modifier.STATIC);
            String ask = owner + member.getSimpleName() + "\", ";
            String head = "";
            String body = "";
            if (code.containsKey(member)) {
                body = code.get(member);
            } else if (member.getModifiers().contains(Modifier.PRIVATE)) {
                continue;
            } else if (member instanceof TypeElement memberType) {
                body = stub(memberType, prompt, program, own, closed, false, true);
            } else if (member instanceof VariableElement && isStatic) {
                head = "public static " + member.asType() + " " + member.getSimpleName();
                body = " = (" + member.asType() + ") " + ask + "null, null);\n";
            } else if (member.getKind() == ElementKind.CONSTRUCTOR && type.getKind() == ElementKind.CLASS && !inner) {
                ExecutableElement constructor = (ExecutableElement) member;
                head = name + signature(constructor);
                body = " { super(NanoRlhfTests.handle(" + ask + passed(constructor, task.getTypes(), "null") + ")); }\n";
            } else if (member.getKind() == ElementKind.METHOD && !isOfObject((ExecutableElement) member)) {
                ExecutableElement method = (ExecutableElement) member;
                TypeMirror result = method.getReturnType();
                head = "public " + (isStatic ? "static " : "") + parameters(method.getTypeParameters()) + " " + result
                    + " " + method.getSimpleName() + signature(method);
                body = " { " + (result.getKind() == TypeKind.VOID ? "" : "return (" + result + ") ") + ask
                    + passed(method, task.getTypes(), isStatic ? "null" : "this") + "; }\n";
            }
            if (namesIn(head, closed).isEmpty()) {
                text.append(head).append(body);
            }
        }
        return text.append("}\n").toString();
    }

    /** Never answered by the program: it must not decide what is equal. */
    private static boolean isOfObject(ExecutableElement method) {
        String name = method.getSimpleName().toString();
        int count = method.getParameters().size();
        return name.equals("equals") && count == 1 || name.equals("hashCode") && count == 0
            || Set.of("getClass", "finalize", "clone", "wait", "notify", "notifyAll").contains(name);
    }

    private static String parameters(List<? extends TypeParameterElement> parameters) {
        if (parameters.isEmpty()) {
            return "";
        }
        return parameters.stream().map(p -> p + p.getBounds().stream().map(TypeMirror::toString)
            .collect(Collectors.joining(" & ", " extends ", ""))).collect(Collectors.joining(", ", "<", ">"));
    }

    /** Parameters and exceptions: only the JDK's; the program's exceptions arrive as unchecked ones. */
    private static String signature(ExecutableElement method) {
        List<String> parts = new ArrayList<>();
        for (VariableElement parameter : method.getParameters()) {
            parts.add(parameter.asType() + " a" + parts.size());
        }
        if (method.isVarArgs()) {
            int last = parts.size() - 1;
            parts.set(last, parts.get(last).replaceFirst("\\[\\] (a\\d+)$", "... $1"));
        }
        String jdk = method.getThrownTypes().stream().map(TypeMirror::toString).filter(t -> t.contains("."))
            .collect(Collectors.joining(", "));
        return "(" + String.join(", ", parts) + ")" + (jdk.isEmpty() ? "" : " throws " + jdk);
    }

    /** Types, target and arguments of a call; the arguments as an array, because a single one may itself be an array. */
    private static String passed(ExecutableElement method, Types types, String target) {
        StringJoiner erased = new StringJoiner(", ", "new String[] {", "}, ");
        StringJoiner arguments = new StringJoiner(", ", ", new Object[] {", "})");
        for (int i = 0; i < method.getParameters().size(); i++) {
            erased.add("\"" + types.erasure(method.getParameters().get(i).asType()) + "\"");
            arguments.add("a" + i);
        }
        return erased + target + arguments;
    }

    private static class Source extends SimpleJavaFileObject {
        private final String text;

        Source(String name, String text) {
            super(URI.create("string:///" + name + ".java"), Kind.SOURCE);
            this.text = text;
        }

        @Override public CharSequence getCharContent(boolean ignoreEncodingErrors) {
            return text;
        }
    }

    private static class InMemory extends ForwardingJavaFileManager<StandardJavaFileManager> {
        private final Map<String, byte[]> classes;

        InMemory(Map<String, byte[]> classes) {
            super(FILES);
            this.classes = classes;
        }

        @Override public JavaFileObject getJavaFileForOutput(
            JavaFileManager.Location location, String name, JavaFileObject.Kind kind, FileObject sibling
        ) {
            return new SimpleJavaFileObject(URI.create("memory:///" + name.replace('.', '/') + kind.extension), kind) {
                @Override public OutputStream openOutputStream() {
                    return new ByteArrayOutputStream() {
                        @Override public void close() {
                            classes.put(name, toByteArray());
                        }
                    };
                }
            };
        }
    }
}
